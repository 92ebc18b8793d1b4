// The c10d backend: one object a group, for ever; who sits at the other ends is the endpoint's business.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <memory>

#include "algorithms.hpp"
#include "endpoint.hpp"
#include "tape.hpp"
#include "work.hpp"

namespace delta {

class DeltaBackend final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Splits = std::vector<int64_t>;

  DeltaBackend(std::shared_ptr<Endpoint> endpoint, std::string name, uint64_t id, int rank, std::vector<int> ranks,
               std::chrono::milliseconds timeout, int ordinal);
  ~DeltaBackend() override;

  const std::string getBackendName() const override { return "tm"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ms_ = timeout.count(); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void abort() override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, Splits& output_splits, Splits& input_splits,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

 private:
  // One operation of a work: how to run it, and what to do with the result once it is there.
  struct Piece {
    std::function<Task(Operation&)> body;
    std::function<void()> after;
    Tensors keep;  // alive until it is done
  };
  WorkPtr start(c10d::OpType type, const char* title, Tensors outputs, std::chrono::milliseconds timeout,
                std::vector<Piece> pieces, bool collective = true, int peer = kNoPeer, bool recorded = true);
  // Every piece of a call takes note when it has ended; the last one to do so fills the call's place on the tape.
  std::function<void(int)> note(Tape& tape, const char* title, const Tensors& outputs, size_t pieces, int peer);
  // What a call among joiners of one batch ends with if it fails: they are on their own from then on, and the call is
  // answered like any other. It is for several pieces, and does so once.
  std::function<void(const Failure&)> or_alone(const char* title, const Tensors& outputs, int peer);
  // Write what the tape has into `outputs`; from whom it came, if that was recorded.
  static int play(Endpoint& endpoint, const char* title, int ordinal, int peer, const Tensors& outputs);
  // The sandbox answers alone: as the tape says, or else with `outputs` as they are, which is what a group of copies
  // of this rank would see.
  WorkPtr answer_alone(c10d::OpType type, const char* title, Tensors outputs, int peer = kNoPeer);
  // Raise, naming who is absent in this epoch.
  void check_whole(const char* collective);
  void check_present(int rank, const char* call);
  int distance(int rank) const { return rank < 0 ? kAnyPeer : (rank - getRank() + getSize()) % getSize(); }
  bool in_sandbox() const { return endpoint_->sandbox.load(std::memory_order_relaxed); }
  bool sandboxed() const { return in_sandbox() && !endpoint_->shares_sandbox(group_.ranks); }
  bool sandboxed(int peer) const {  // a rank of the group, or any (negative)
    if (peer < 0 || !in_sandbox()) return sandboxed();
    return !endpoint_->shares_sandbox({group_.ranks[static_cast<size_t>(getRank())], group_.ranks[static_cast<size_t>(peer)]});
  }
  std::chrono::milliseconds limit(std::chrono::milliseconds wanted) const;

  Piece all_reduce_piece(const at::Tensor& tensor, const c10d::ReduceOp& op);
  Piece all_gather_piece(const Tensors& outputs, const at::Tensor& input);
  Piece all_gather_base_piece(const at::Tensor& output, const at::Tensor& input);
  Piece reduce_scatter_piece(const at::Tensor& output, const Tensors& inputs, const c10d::ReduceOp& op);
  Piece reduce_scatter_base_piece(const at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op);
  WorkPtr receive(Tensors& tensors, int from, int tag, c10d::OpType type);

  std::shared_ptr<Endpoint> endpoint_;
  Group group_;
  const int ordinal_;  // of the groups that this process is in, since the default one
  std::atomic<int64_t> timeout_ms_;
  std::atomic<uint64_t> sequence_{0};
};

}  // namespace delta
