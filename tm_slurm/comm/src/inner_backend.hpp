// A group over a stock backend (NCCL, gloo): the object stays, the backend inside is swapped.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "failure.hpp"

namespace delta {

class ShieldedWork;  // in inner_backend.cpp

class InnerBackend final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using Splits = std::vector<int64_t>;

  // With `shield` the inner backend writes to copies, and results are copied out if they are still wanted: for backends
  // whose abort() does not stop what is in flight (gloo). Without it, its own Work objects are handed out.
  InnerBackend(BackendPtr inner, std::string name, int rank, int size, bool shield);

  // The new inner backend takes over; the old one is returned, to be dropped where that may take time.
  BackendPtr swap(BackendPtr next);
  // In flight and from now on until swap(): GroupInterrupted. Does not wait for anything.
  void interrupt();
  BackendPtr inner() const;
  // Sandbox: while set, this one answers instead (a DeltaBackend whose endpoint is in sandbox mode).
  void answer_with(BackendPtr alone);

  const std::string getBackendName() const override { return name_; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return inner()->getBackendOptions(); }
  void setTimeout(std::chrono::milliseconds timeout) override { inner()->setTimeout(timeout); }
  void abort() override { inner()->abort(); }
  void shutdown() override { inner()->shutdown(); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, Splits& output_splits, Splits& input_splits,
                        const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int to, int tag) override;
  WorkPtr recv(Tensors& tensors, int from, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

 private:
  friend class ShieldedWork;  // in inner_backend.cpp
  using Pairs = std::vector<std::pair<at::Tensor, at::Tensor>>;  // the caller's tensor, and the copy to write to
  class Shield {
   public:
    explicit Shield(bool on) : on_(on) {}
    at::Tensor changed(const at::Tensor& tensor);  // read and written
    at::Tensor written(const at::Tensor& tensor);  // only written
    Tensors changed(const Tensors& tensors);
    Tensors written(const Tensors& tensors);
    TensorLists written(const TensorLists& lists);
    Pairs pairs;

   private:
    bool on_;
  };
  // `waited`: the inner work has no future and makes progress only while somebody waits for it (gloo's send and recv).
  WorkPtr run(c10d::OpType type, const std::function<WorkPtr(c10d::Backend&, Shield&)>& post, bool waited = false);

  struct Flight;              // what is in flight; outlives the group while callbacks may come
  mutable std::mutex mutex_;  // before Flight::mutex
  BackendPtr inner_, alone_;
  bool interrupted_ = false;
  const std::shared_ptr<Flight> flight_;
  const std::string name_;
  const bool shield_;
};

}  // namespace delta
