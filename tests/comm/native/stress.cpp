// Collectives of several groups and sizes, point-to-point messages, interrupts at random moments and replacements, all
// checked; meant for the sanitizers. `stress SECONDS [SEED]`
#include <random>
#include <thread>

#include "world.hpp"

namespace delta {
namespace {

constexpr int kSize = 4, kGroups = 3;
const size_t kCounts[] = {1, 5, 4096, 4097, 30000, 300001};

struct Job {
  int group;
  size_t count;
  int kind;  // 0 all-reduce, 1 broadcast, 2 reduce-scatter-like all-to-all, 3 barrier, 4 point-to-point ring
};

// What one rank does; throws away everything at the first interrupt. Returns false if it was interrupted.
bool work(Rank& me, const std::vector<Job>& jobs) {
  std::vector<std::vector<float>> buffers;
  std::vector<std::future<std::optional<Failure>>> futures;
  buffers.reserve(jobs.size() * 2);
  for (const Job& job : jobs) {
    buffers.emplace_back(job.count, static_cast<float>(me.rank + 1));
    float* data = buffers.back().data();
    Span span{reinterpret_cast<char*>(data), job.count * sizeof(float)};
    size_t count = job.count;
    if (job.kind == 0) {
      futures.push_back(me.start(job.group, [=](Operation& op) { return all_reduce(op, span.data, count, kSum); }));
    } else if (job.kind == 1) {
      futures.push_back(me.start(job.group, [=](Operation& op) { return broadcast(op, 2, span); }));
    } else if (job.kind == 2) {
      buffers.emplace_back(count * kSize, -1.0f);
      char* in = reinterpret_cast<char*>(buffers.back().data());
      std::vector<Span> parts;
      std::vector<ConstSpan> out;
      for (int rank = 0; rank < kSize; rank++) {
        parts.push_back({in + span.bytes * static_cast<size_t>(rank), span.bytes});
        out.push_back({span.data, span.bytes});
      }
      futures.push_back(me.start(job.group, [=](Operation& op) { return all_to_all(op, out, parts); }));
    } else if (job.kind == 3) {
      futures.push_back(me.start(job.group, [=](Operation& op) { return barrier(op); }));
    } else {
      buffers.emplace_back(count, -1.0f);
      Span incoming{reinterpret_cast<char*>(buffers.back().data()), span.bytes};
      int to = (me.rank + 1) % kSize, from = (me.rank + kSize - 1) % kSize;
      futures.push_back(
          me.start(job.group, [=](Operation& op) { return send_to(op, to, 7, {span.data, span.bytes}); }, false));
      futures.push_back(me.start(job.group, [=](Operation& op) { return recv_from(op, from, 7, incoming); }, false));
    }
  }
  bool whole = true;
  for (auto& future : futures) {
    CHECK(future.wait_for(std::chrono::seconds(60)) == std::future_status::ready);
    auto failure = future.get();
    if (!failure) continue;
    if (failure->fault != Fault::kInterrupted) std::fprintf(stderr, "rank %d: %s\n", me.rank, failure->message.c_str());
    CHECK(failure->fault == Fault::kInterrupted);
    whole = false;
  }
  if (!whole) return false;
  size_t at = 0;
  for (const Job& job : jobs) {
    const auto& buffer = buffers[at++];
    if (job.kind == 0)
      for (float value : buffer) CHECK(value == 10.0f);
    if (job.kind == 1)
      for (float value : buffer) CHECK(value == 3.0f);
    if (job.kind == 2) {
      const auto& in = buffers[at++];
      for (size_t i = 0; i < in.size(); i++) {
        auto rank = static_cast<int>(i / job.count);
        CHECK(in[i] == (rank == me.rank ? -1.0f : static_cast<float>(rank + 1)));
      }
    }
    if (job.kind == 4)
      for (float value : buffers[at]) CHECK(value == static_cast<float>((me.rank + kSize - 1) % kSize + 1));
    if (job.kind == 4) at++;
  }
  return true;
}

void run(double seconds, unsigned seed) {
  std::mt19937 random(seed);
  World world(kSize, kGroups);
  uint32_t epoch = 0;
  auto until = Clock::now() + std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
  int rounds = 0, interrupts = 0, replacements = 0;
  while (Clock::now() < until) {
    std::vector<Job> jobs;
    for (unsigned i = 0; i < 1 + random() % 12; i++)
      jobs.push_back({static_cast<int>(random() % kGroups), kCounts[random() % 6], static_cast<int>(random() % 5)});
    bool interrupt = random() % 3 == 0;
    auto delay = std::chrono::microseconds(random() % 3000);
    std::vector<std::thread> threads;
    std::vector<char> whole(kSize, 0);
    for (int rank = 0; rank < kSize; rank++)
      threads.emplace_back([&, rank] { whole[static_cast<size_t>(rank)] = work(*world.ranks[static_cast<size_t>(rank)], jobs); });
    if (interrupt) {
      std::this_thread::sleep_for(delay);
      for (auto& one : world.ranks) one->endpoint->interrupt(epoch);
      interrupts++;
    }
    for (auto& thread : threads) thread.join();
    rounds++;
    bool replaced = random() % 4 == 0;
    if (!interrupt && !replaced) {
      for (char one : whole) CHECK(one);
      continue;
    }
    epoch++;
    if (replaced) {
      world.replace(static_cast<int>(random() % kSize), epoch);
      replacements++;
    } else {
      for (auto& one : world.ranks) one->endpoint->switch_to(epoch);
    }
  }
  std::printf("%d rounds, %d interrupts, %d replacements\n", rounds, interrupts, replacements);
}

}  // namespace
}  // namespace delta

int main(int argc, char** argv) {
  delta::run(argc > 1 ? std::atof(argv[1]) : 5.0, argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1u);
}
