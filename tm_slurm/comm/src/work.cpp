#include "work.hpp"

#include "errors.hpp"

namespace delta {

DeltaWork::DeltaWork(std::shared_ptr<Endpoint> endpoint, int rank, c10d::OpType type, const char* title,
                     std::vector<at::Tensor> outputs, size_t pieces)
    : Work(rank, type, title), endpoint_(std::move(endpoint)), outputs_(std::move(outputs)), pieces_(pieces) {}

void DeltaWork::piece_done(const Failure* failure, int source_rank) {
  if (source_rank >= 0) source_rank_ = source_rank;
  bool last = pieces_.fetch_sub(1) == 1;
  if (failure ? failed_.exchange(true) : (!last || failed_.load())) return;
  finish(failure ? to_exception(*failure) : nullptr);
  std::unique_lock<std::mutex> lock(future_mutex_);
  settled_ = true;
  auto future = future_;
  lock.unlock();
  // Callbacks of a future may be Python, and may wait for other collectives: not on this thread.
  if (future) endpoint_->defer([self = c10::intrusive_ptr<DeltaWork>::unsafe_reclaim_from_nonowning(this), future] { self->settle(future); });
}

void DeltaWork::settle(const c10::intrusive_ptr<c10::ivalue::Future>& future) {
  if (auto error = exception())
    future->setError(error);
  else
    future->markCompleted(at::IValue(outputs_));
}

c10::intrusive_ptr<c10::ivalue::Future> DeltaWork::getFuture() {
  std::unique_lock<std::mutex> lock(future_mutex_);
  if (future_) return future_;
  future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  auto future = future_;
  bool settled = settled_;
  lock.unlock();
  if (settled) settle(future);
  return future;
}

}  // namespace delta
