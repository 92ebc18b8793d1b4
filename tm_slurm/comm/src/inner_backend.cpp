#include "inner_backend.hpp"

#include <ATen/ATen.h>

#include <map>

#include "errors.hpp"

namespace delta {
namespace {

Failure interruption() {
  return {Fault::kInterrupted, "the group was interrupted; waiting for the switch to another inner backend", -1};
}

}  // namespace

// Completes when the inner work does, or when the group is interrupted: then the copies are left to the inner backend.
class ShieldedWork final : public c10d::Work {
 public:
  using Pairs = std::vector<std::pair<at::Tensor, at::Tensor>>;
  ShieldedWork(int rank, c10d::OpType type, Pairs pairs, c10::intrusive_ptr<c10d::Work> inner, bool waited)
      : Work(rank, type),
        inner_(std::move(inner)),
        waited_(waited),
        pairs_(std::move(pairs)),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

  void settle(std::exception_ptr error) {
    {
      std::lock_guard<std::mutex> lock(settling_);  // an interrupt waits until a copy that has begun is whole
      if (settled_) return;
      settled_ = true;
      at::NoGradGuard no_grad;
      if (!error)
        for (auto& [original, copy] : pairs_) original.copy_(copy);
    }
    for (auto& [original, copy] : pairs_) outputs_.push_back(original);
    finish(error);
    if (error)
      future_->setError(error);
    else
      future_->markCompleted(at::IValue(outputs_));
  }
  ~ShieldedWork() override {
    if (on_end) on_end(this);
  }
  std::function<void(ShieldedWork*)> on_end;
  void interrupt(std::exception_ptr error) {
    settle(error);
    if (waited_) inner_->abort();
  }
  bool wait(std::chrono::milliseconds timeout) override {
    if (waited_ && !isCompleted()) {
      try {
        inner_->wait(timeout);
        settle(nullptr);
      } catch (const std::exception&) {
        settle(std::current_exception());
      }
    }
    return Work::wait(timeout);
  }
  bool isCompleted() override {
    if (waited_ && !Work::isCompleted() && inner_->isCompleted()) settle(inner_->exception());
    return Work::isCompleted();
  }
  int sourceRank() const override { return inner_ ? inner_->sourceRank() : -1; }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  const c10::intrusive_ptr<c10d::Work> inner_;
  const bool waited_;
  std::mutex settling_;
  bool settled_ = false;
  Pairs pairs_;
  std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

struct InnerBackend::Flight {
  std::mutex mutex;
  std::map<ShieldedWork*, c10::weak_intrusive_ptr<ShieldedWork>> works;
};

InnerBackend::InnerBackend(BackendPtr inner, std::string name, int rank, int size, bool shield)
    : Backend(rank, size), inner_(std::move(inner)), flight_(std::make_shared<Flight>()), name_(std::move(name)), shield_(shield) {}

InnerBackend::BackendPtr InnerBackend::inner() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return inner_;
}

void InnerBackend::answer_with(BackendPtr alone) {
  std::lock_guard<std::mutex> lock(mutex_);
  alone_ = std::move(alone);
}

InnerBackend::BackendPtr InnerBackend::swap(BackendPtr next) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::swap(inner_, next);
  interrupted_ = false;
  return next;
}

void InnerBackend::interrupt() {
  std::vector<c10::intrusive_ptr<ShieldedWork>> works;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    interrupted_ = true;
    std::lock_guard<std::mutex> flight_lock(flight_->mutex);
    for (auto& [work, reference] : flight_->works)
      if (auto alive = reference.lock()) works.push_back(std::move(alive));
    flight_->works.clear();
  }
  for (auto& work : works) work->interrupt(to_exception(interruption()));
}

at::Tensor InnerBackend::Shield::changed(const at::Tensor& tensor) {
  if (!on_) return tensor;
  at::NoGradGuard no_grad;
  pairs.emplace_back(tensor, tensor.clone(at::MemoryFormat::Contiguous));
  return pairs.back().second;
}

at::Tensor InnerBackend::Shield::written(const at::Tensor& tensor) {
  if (!on_) return tensor;
  pairs.emplace_back(tensor, at::empty_like(tensor, tensor.options(), at::MemoryFormat::Contiguous));
  return pairs.back().second;
}

InnerBackend::Tensors InnerBackend::Shield::changed(const Tensors& tensors) {
  Tensors copies;
  for (const at::Tensor& tensor : tensors) copies.push_back(changed(tensor));
  return copies;
}

InnerBackend::Tensors InnerBackend::Shield::written(const Tensors& tensors) {
  Tensors copies;
  for (const at::Tensor& tensor : tensors) copies.push_back(written(tensor));
  return copies;
}

InnerBackend::TensorLists InnerBackend::Shield::written(const TensorLists& lists) {
  TensorLists copies;
  for (const Tensors& tensors : lists) copies.push_back(written(tensors));
  return copies;
}

InnerBackend::WorkPtr InnerBackend::run(c10d::OpType type,
                                        const std::function<WorkPtr(c10d::Backend&, Shield&)>& post, bool waited) {
  BackendPtr inner, alone;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    alone = alone_;
    if (!interrupted_) inner = inner_;
  }
  if (alone) {
    Shield none(false);
    return post(*alone, none);
  }
  if (!inner) {
    auto refused = c10::make_intrusive<ShieldedWork>(getRank(), type, Pairs{}, nullptr, false);
    refused->settle(to_exception(interruption()));
    return refused;
  }
  Shield shield(shield_);
  WorkPtr posted = post(*inner, shield);
  if (!shield_) return posted;
  auto work = c10::make_intrusive<ShieldedWork>(getRank(), type, std::move(shield.pairs), posted, waited);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    bool late = interrupted_ || inner_ != inner;
    if (!late) {
      std::lock_guard<std::mutex> flight_lock(flight_->mutex);
      flight_->works.emplace(work.get(), c10::weak_intrusive_ptr<ShieldedWork>(work));
    } else {
      inner = nullptr;
    }
  }
  if (!inner) {
    work->interrupt(to_exception(interruption()));
    return work;
  }
  auto land = [flight = flight_](ShieldedWork* landed) {
    std::lock_guard<std::mutex> flight_lock(flight->mutex);
    flight->works.erase(landed);
  };
  if (waited) {
    work->on_end = land;
    return work;
  }
  posted->getFuture()->addCallback(
      [land, work](c10::ivalue::Future& done) {
        land(work.get());
        work->settle(done.hasError() ? done.exception_ptr() : nullptr);
      },
      false);
  return work;
}

InnerBackend::WorkPtr InnerBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return run(c10d::OpType::BROADCAST, [&](Backend& inner, Shield& shield) {
    Tensors copies = shield.changed(tensors);
    return inner.broadcast(copies, options);
  });
}

InnerBackend::WorkPtr InnerBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return run(c10d::OpType::ALLREDUCE, [&](Backend& inner, Shield& shield) {
    Tensors copies = shield.changed(tensors);
    return inner.allreduce(copies, options);
  });
}

InnerBackend::WorkPtr InnerBackend::allreduce_coalesced(Tensors& tensors,
                                                        const c10d::AllreduceCoalescedOptions& options) {
  return run(c10d::OpType::ALLREDUCE_COALESCED, [&](Backend& inner, Shield& shield) {
    Tensors copies = shield.changed(tensors);
    return inner.allreduce_coalesced(copies, options);
  });
}

InnerBackend::WorkPtr InnerBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return run(c10d::OpType::REDUCE, [&](Backend& inner, Shield& shield) {
    Tensors copies = shield.changed(tensors);
    return inner.reduce(copies, options);
  });
}

InnerBackend::WorkPtr InnerBackend::allgather(TensorLists& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) {
  return run(c10d::OpType::ALLGATHER, [&](Backend& inner, Shield& shield) {
    TensorLists copies = shield.written(outputs);
    return inner.allgather(copies, inputs, options);
  });
}

InnerBackend::WorkPtr InnerBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                    const c10d::AllgatherOptions& options) {
  return run(c10d::OpType::_ALLGATHER_BASE, [&](Backend& inner, Shield& shield) {
    at::Tensor copy = shield.written(output);
    return inner._allgather_base(copy, input, options);
  });
}

InnerBackend::WorkPtr InnerBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                    const c10d::AllgatherOptions& options) {
  return run(c10d::OpType::_ALLGATHER_BASE, [&](Backend& inner, Shield& shield) {
    Tensors copies = shield.written(outputs);
    return inner.allgather_into_tensor_coalesced(copies, inputs, options);
  });
}

InnerBackend::WorkPtr InnerBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                   const c10d::ReduceScatterOptions& options) {
  return run(c10d::OpType::REDUCE_SCATTER, [&](Backend& inner, Shield& shield) {
    Tensors copies = shield.written(outputs);
    return inner.reduce_scatter(copies, inputs, options);
  });
}

InnerBackend::WorkPtr InnerBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                         const c10d::ReduceScatterOptions& options) {
  return run(c10d::OpType::_REDUCE_SCATTER_BASE, [&](Backend& inner, Shield& shield) {
    at::Tensor copy = shield.written(output);
    return inner._reduce_scatter_base(copy, input, options);
  });
}

InnerBackend::WorkPtr InnerBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                    const c10d::ReduceScatterOptions& options) {
  return run(c10d::OpType::_REDUCE_SCATTER_BASE, [&](Backend& inner, Shield& shield) {
    Tensors copies = shield.written(outputs);
    return inner.reduce_scatter_tensor_coalesced(copies, inputs, options);
  });
}

InnerBackend::WorkPtr InnerBackend::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  return run(c10d::OpType::GATHER, [&](Backend& inner, Shield& shield) {
    TensorLists copies = shield.written(outputs);
    return inner.gather(copies, inputs, options);
  });
}

InnerBackend::WorkPtr InnerBackend::scatter(Tensors& outputs, TensorLists& inputs,
                                            const c10d::ScatterOptions& options) {
  return run(c10d::OpType::SCATTER, [&](Backend& inner, Shield& shield) {
    Tensors copies = shield.written(outputs);
    return inner.scatter(copies, inputs, options);
  });
}

InnerBackend::WorkPtr InnerBackend::alltoall_base(at::Tensor& output, at::Tensor& input, Splits& output_splits,
                                                  Splits& input_splits, const c10d::AllToAllOptions& options) {
  return run(c10d::OpType::ALLTOALL_BASE, [&](Backend& inner, Shield& shield) {
    at::Tensor copy = shield.written(output);
    return inner.alltoall_base(copy, input, output_splits, input_splits, options);
  });
}

InnerBackend::WorkPtr InnerBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  return run(c10d::OpType::ALLTOALL, [&](Backend& inner, Shield& shield) {
    Tensors copies = shield.written(outputs);
    return inner.alltoall(copies, inputs, options);
  });
}

InnerBackend::WorkPtr InnerBackend::send(Tensors& tensors, int to, int tag) {
  return run(c10d::OpType::SEND, [&](Backend& inner, Shield&) { return inner.send(tensors, to, tag); }, true);
}

InnerBackend::WorkPtr InnerBackend::recv(Tensors& tensors, int from, int tag) {
  return run(c10d::OpType::RECV, [&](Backend& inner, Shield& shield) {
    Tensors copies = shield.written(tensors);
    return inner.recv(copies, from, tag);
  }, true);
}

InnerBackend::WorkPtr InnerBackend::recvAnysource(Tensors& tensors, int tag) {
  return run(c10d::OpType::RECVANYSOURCE, [&](Backend& inner, Shield& shield) {
    Tensors copies = shield.written(tensors);
    return inner.recvAnysource(copies, tag);
  }, true);
}

InnerBackend::WorkPtr InnerBackend::barrier(const c10d::BarrierOptions& options) {
  return run(c10d::OpType::BARRIER, [&](Backend& inner, Shield&) { return inner.barrier(options); });
}

}  // namespace delta
