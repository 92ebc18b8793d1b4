// The torch side of an operation: what the caller waits for.
#pragma once
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <memory>

#include "endpoint.hpp"

namespace delta {

class DeltaWork final : public c10d::Work {
 public:
  DeltaWork(std::shared_ptr<Endpoint> endpoint, int rank, c10d::OpType type, const char* title,
            std::vector<at::Tensor> outputs, size_t pieces);

  // A piece of the work is done; the last one, or the first failure, completes it.
  void piece_done(const Failure* failure, int source_rank);

  int sourceRank() const override { return source_rank_; }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return sequence; }
  std::atomic<uint64_t> sequence{0};

 private:
  void settle(const c10::intrusive_ptr<c10::ivalue::Future>& future);

  std::shared_ptr<Endpoint> endpoint_;
  std::vector<at::Tensor> outputs_;
  std::atomic<size_t> pieces_;
  std::atomic<bool> failed_{false};
  std::atomic<int> source_rank_{-1};
  std::mutex future_mutex_;
  bool settled_ = false;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace delta
