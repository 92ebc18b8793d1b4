// Worlds of three processes in which one is killed in the middle of collectives and messages of all kinds: the
// others have them fail, interrupt the epoch, and go on to the next one. deaths SECONDS [SEED]
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <random>

#include "world.hpp"

using namespace delta;

namespace {

constexpr int kRanks = 3, kGroups = 3, kSteps = 400;
constexpr size_t kCounts[] = {1, 5, 4096, 4097, 30000, 300001};
using Random = std::mt19937;
using Result = std::future<std::optional<Failure>>;

// All ranks draw the same calls: their generators begin alike.
struct Calls {
  Rank& me;
  Random& random;
  std::vector<std::vector<float>> buffers;
  std::vector<Result> results;

  Span fresh(size_t count) {
    buffers.emplace_back(count, 1.0f);
    return {reinterpret_cast<char*>(buffers.back().data()), count * sizeof(float)};
  }

  void one() {
    int group = static_cast<int>(random() % kGroups);
    auto kind = random() % 5;
    size_t count = kCounts[random() % std::size(kCounts)];
    Span own = fresh(count);
    switch (kind) {
      case 0:
        return launch(group, [=](Operation& operation) { return all_reduce(operation, own.data, count, kSum); });
      case 1: return launch(group, [=](Operation& operation) { return broadcast(operation, 2, own); });
      case 2: return launch(group, [=](Operation& operation) { return barrier(operation); });
      case 3: return exchange(group, own, count);
      default: return pass_on(group, own, count);
    }
  }

  void exchange(int group, Span own, size_t count) {
    Span in = fresh(count * kRanks);
    std::vector<Span> parts;
    std::vector<ConstSpan> outs;
    for (int rank = 0; rank < kRanks; rank++) {
      parts.push_back({in.data + own.bytes * static_cast<size_t>(rank), own.bytes});
      outs.push_back({own.data, own.bytes});
    }
    launch(group, [=](Operation& operation) { return all_to_all(operation, outs, parts); });
  }

  void pass_on(int group, Span own, size_t count) {
    Span in = fresh(count);
    int to = (me.rank + 1) % kRanks, from = (me.rank + kRanks - 1) % kRanks;
    launch(group, [=](Operation& operation) { return send_to(operation, to, 7, {own.data, own.bytes}); }, false);
    launch(group, [=](Operation& operation) { return recv_from(operation, from, 7, in); }, false);
  }

  void launch(int group, std::function<Task(Operation&)> body, bool collective = true) {
    results.push_back(me.start(group, std::move(body), collective));
  }

  bool all_succeed() {
    bool good = true;
    for (Result& result : results) {
      if (result.wait_for(std::chrono::seconds(10)) != std::future_status::ready) me.endpoint->interrupt(0);
      if (!result.get()) continue;
      if (good) me.endpoint->interrupt(0);  // as the coordinator would have it
      good = false;
    }
    return good;
  }
};

int live(int rank, std::atomic<int>* ports, unsigned seed) {
  Random random(seed);
  Rank me(rank, kRanks, kGroups, 0);
  ports[rank] = me.endpoint->port();
  std::map<int, Address> peers;
  for (int other = 0; other < kRanks; other++) {
    while (ports[other] == 0) ::usleep(200);
    peers[other] = {"127.0.0.1", static_cast<uint16_t>(ports[other]), 0};
  }
  me.endpoint->configure(rank, 0, 1, peers);
  me.join();
  for (int step = 0; step < kSteps; step++) {
    Calls calls{me, random, {}, {}};
    for (auto left = 1 + random() % 8; left > 0; left--) calls.one();
    if (calls.all_succeed()) continue;
    me.endpoint->prepare(1, {});
    me.endpoint->switch_to(1);
    break;
  }
  return 0;
}

bool world_survives(unsigned seed) {
  void* shared = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  CHECK(shared != MAP_FAILED);
  auto* ports = static_cast<std::atomic<int>*>(shared);
  pid_t processes[kRanks];
  for (int rank = 0; rank < kRanks; rank++) {
    processes[rank] = ::fork();
    if (processes[rank] == 0) {
      int code = live(rank, ports, seed);
      std::fflush(nullptr);
      ::_exit(code);
    }
  }
  Random random(seed * 7919 + 1);
  ::usleep(30000 + random() % 150000);
  ::kill(processes[random() % kRanks], SIGKILL);
  bool good = true;
  for (pid_t process : processes) {
    int status = 0;
    ::waitpid(process, &status, 0);
    bool killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    if (killed || (WIFEXITED(status) && WEXITSTATUS(status) == 0)) continue;
    std::fprintf(stderr, "seed %u: a survivor ended with status %x\n", seed, status);
    good = false;
  }
  ::munmap(shared, 4096);
  return good;
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc > 1);
  auto until = Clock::now() + std::chrono::milliseconds(static_cast<int64_t>(std::atof(argv[1]) * 1000));
  unsigned seed = argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1;
  int worlds = 0, lost = 0;
  for (; Clock::now() < until; worlds++) lost += !world_survives(seed + static_cast<unsigned>(worlds));
  std::printf("deaths: %d worlds, %d in which a survivor crashed\n", worlds, lost);
  return lost > 0;
}
