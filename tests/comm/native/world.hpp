// Endpoints and groups for the native tests: the transport without torch.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "algorithms.hpp"
#include "endpoint.hpp"

#define CHECK(what)                                                        \
  do {                                                                     \
    if (!(what)) {                                                         \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what);      \
      std::abort();                                                        \
    }                                                                      \
  } while (false)

namespace delta {

inline const std::string kSecret = "0123456789abcdef0123456789abcdef";
inline const std::string kJob = "job-1";

inline std::shared_ptr<Endpoint> make_endpoint(uint64_t incarnation) {
  return std::make_shared<Endpoint>(kSecret, kJob, "127.0.0.1", incarnation, 30.0, 0.0);
}

inline Address address_of(const Endpoint& endpoint, uint64_t incarnation) {
  return {"127.0.0.1", static_cast<uint16_t>(endpoint.port()), incarnation};
}

inline void sum_floats(char* out, const char* a, const char* b, size_t count) {
  for (size_t i = 0; i < count; i++) {
    float x, y;
    std::memcpy(&x, a + i * sizeof x, sizeof x);
    std::memcpy(&y, b + i * sizeof y, sizeof y);
    x += y;
    std::memcpy(out + i * sizeof x, &x, sizeof x);
  }
}
inline const Reduction kSum{sum_floats, sizeof(float)};

// A rank of a world: its endpoint, and its object of each of a few groups over all ranks.
struct Rank {
  Rank(int rank, int size, int groups, uint64_t incarnation)
      : rank(rank), incarnation(incarnation), endpoint(make_endpoint(incarnation)) {
    for (int index = 0; index < groups; index++) {
      auto group = std::make_unique<Group>();
      group->id = static_cast<uint64_t>(index) + 1;
      group->rank = rank;
      for (int other = 0; other < size; other++) group->ranks.push_back(other);
      group->name = "group " + std::to_string(index);
      this->groups.push_back(std::move(group));
    }
  }
  ~Rank() {
    endpoint->close();
    for (auto& group : groups)
      if (joined) endpoint->remove_group(*group);
  }
  void join() {  // after configure
    for (auto& group : groups) endpoint->add_group(*group);
    joined = true;
  }
  // Starts an operation; the future holds the failure's kind, or nothing.
  std::future<std::optional<Failure>> start(int group, std::function<Task(Operation&)> body, bool collective = true) {
    auto promise = std::make_shared<std::promise<std::optional<Failure>>>();
    auto future = promise->get_future();
    Launch launch;
    launch.name = "operation";
    launch.timeout = std::chrono::seconds(30);
    launch.collective = collective;
    launch.body = std::move(body);
    launch.finished = [promise](const Failure* failure, int) {
      promise->set_value(failure ? std::optional<Failure>(*failure) : std::nullopt);
    };
    endpoint->launch(*groups[static_cast<size_t>(group)], std::move(launch));
    return future;
  }

  int rank;
  uint64_t incarnation;
  std::shared_ptr<Endpoint> endpoint;
  std::vector<std::unique_ptr<Group>> groups;
  bool joined = false;
};

struct World {
  World(int size, int groups) : size(size), groups(groups) {
    for (int rank = 0; rank < size; rank++) ranks.push_back(std::make_unique<Rank>(rank, size, groups, 0));
    for (auto& one : ranks) {
      one->endpoint->configure(one->rank, 0, 1, table());
      one->join();
    }
  }
  std::map<int, Address> table() const {
    std::map<int, Address> peers;
    for (auto& one : ranks) peers[one->rank] = address_of(*one->endpoint, one->incarnation);
    return peers;
  }
  // The two phases, the leaver closed at the end.
  void replace(int rank, uint32_t epoch) {
    auto& leaver = ranks[static_cast<size_t>(rank)];
    auto joiner = std::make_unique<Rank>(rank, size, groups, leaver->incarnation + 1);
    std::map<int, Address> change{{rank, address_of(*joiner->endpoint, joiner->incarnation)}}, peers = table();
    peers[rank] = change[rank];
    std::vector<int> stayers;
    for (auto& one : ranks)
      if (one->rank != rank) {
        one->endpoint->prepare(epoch, change);
        stayers.push_back(one->rank);
      }
    joiner->endpoint->configure(rank, epoch, 1, peers);
    joiner->join();
    joiner->endpoint->dial(epoch, stayers, 20);
    for (auto& one : ranks)
      if (one->rank != rank) {
        CHECK(one->endpoint->wait_staged(epoch, {rank}, 20));
        one->endpoint->switch_to(epoch);
      }
    leaver = std::move(joiner);
  }
  int size, groups;
  std::vector<std::unique_ptr<Rank>> ranks;
};

}  // namespace delta
