// What the collectives of one process have answered, call by call (TrainMover section 4): taken down on a rank of a
// running job, played in the sandbox of a standby. An endpoint that has none attached does not know that tapes exist.
#pragma once
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace delta {

// Point-to-point traffic of the runtime itself: nothing of it belongs on a tape, a shadow step has none.
constexpr int kUnrecordedTag = 0x746d;
constexpr int kNoPeer = -1, kAnyPeer = -2;

class Tape {
 public:
  // One call: which collective, in the how-manieth group of the process, from whom (how many ranks further on in the
  // group; so the same for every rank of a role class). `outputs` are undefined until it has ended.
  struct Call {
    int64_t step = -1;  // -1: before the first step
    std::string name;
    int group = 0, peer = kNoPeer, source = kNoPeer;
    std::vector<at::Tensor> outputs;
  };

  explicit Tape(int64_t limit_bytes) : limit_bytes_(limit_bytes) {}  // to take down
  explicit Tape(std::vector<Call> calls);                            // to play

  bool plays() const { return plays_; }
  void begin_step(int64_t step);

  // Taking down: make room in the order of the calls, fill it when the call has ended.
  size_t reserve(const char* name, int group, int peer, const std::vector<at::Tensor>& outputs);
  void fill(size_t place, const std::vector<at::Tensor>& outputs, int source);
  std::vector<Call> take();  // everything; what comes later is dropped
  bool overflowed();
  int64_t held_bytes();

  // Playing: write the next fitting answer into the outputs. False, and a word about it, when there is none.
  bool answer(const char* name, int group, int peer, const std::vector<at::Tensor>& outputs, int* source);
  int64_t answered();
  int64_t missed();
  std::string first_miss();

 private:
  struct Lane {
    std::vector<size_t> places;
    size_t next = 0;
  };
  using Lanes = std::map<std::pair<int, int>, Lane>;

  void miss(const char* name, int group, const std::vector<at::Tensor>& outputs, const char* why);

  std::mutex mutex_;
  const int64_t limit_bytes_ = 0;
  const bool plays_ = false;
  bool open_ = true, overflowed_ = false, again_ = false;
  int64_t step_ = -1, last_step_ = -1, held_bytes_ = 0, answered_ = 0, missed_ = 0;
  std::vector<Call> calls_;
  std::map<int64_t, Lanes> lanes_;
  std::string first_miss_;
};

}  // namespace delta
