#include "backend_tensors.hpp"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace delta {

void check_tensor(const at::Tensor& tensor, const char* collective) {
  TORCH_CHECK(tensor.defined(), collective, ": expected a tensor, found none");
  TORCH_CHECK(tensor.device().is_cpu() || tensor.device().is_cuda(), collective,
              ": expected a CPU or CUDA tensor, found one on ", tensor.device());
  TORCH_CHECK(tensor.layout() == at::kStrided, collective, ": expected a dense tensor, found ", tensor.layout(),
              "; call to_dense() first");
}

void check_single(const std::vector<at::Tensor>& tensors, const char* collective) {
  TORCH_CHECK(tensors.size() == 1, collective, ": expected one tensor, found ", tensors.size());
  check_tensor(tensors[0], collective);
}

void check_same(const at::Tensor& a, const at::Tensor& b, const char* collective) {
  check_tensor(b, collective);
  TORCH_CHECK(a.scalar_type() == b.scalar_type(), collective, ": expected tensors of one type, found ",
              a.scalar_type(), " and ", b.scalar_type());
}

Reduction reduction_of(const at::Tensor& tensor, const c10d::ReduceOp& op, const char* collective) {
  ReduceKind kind = ReduceKind::kSum;
  switch (op.op_) {
    case c10d::ReduceOp::SUM: break;
    case c10d::ReduceOp::AVG:
      TORCH_CHECK(at::isFloatingType(tensor.scalar_type()) || at::isComplexType(tensor.scalar_type()), collective,
                  ": AVG needs a floating-point tensor, found ", tensor.scalar_type(), "; use SUM and divide");
      break;
    case c10d::ReduceOp::PRODUCT: kind = ReduceKind::kProduct; break;
    case c10d::ReduceOp::MIN: kind = ReduceKind::kMin; break;
    case c10d::ReduceOp::MAX: kind = ReduceKind::kMax; break;
    case c10d::ReduceOp::BAND: kind = ReduceKind::kAnd; break;
    case c10d::ReduceOp::BOR: kind = ReduceKind::kOr; break;
    case c10d::ReduceOp::BXOR: kind = ReduceKind::kXor; break;
    default: TORCH_CHECK(false, collective, ": this ReduceOp is not supported by backend \"tm\"");
  }
  Reduction reduction = reduction_for(tensor.scalar_type(), kind);
  TORCH_CHECK(reduction.apply != nullptr, collective, ": this ReduceOp has no meaning for ", tensor.scalar_type());
  return reduction;
}

void conclude(at::Tensor& tensor, const c10d::ReduceOp& op, int size) {
  if (op.op_ != c10d::ReduceOp::AVG) return;
  at::NoGradGuard no_grad;
  tensor.div_(size);
}

at::Tensor staged(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor.contiguous();
  at::NoGradGuard no_grad;
  at::Tensor host = at::empty(tensor.sizes(), tensor.options().device(at::kCPU).pinned_memory(true));
  host.copy_(tensor);  // blocking: behind everything on the current stream
  return host;
}

at::Tensor dense_like(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) {
    if (tensor.is_contiguous()) return tensor;
    return at::empty_like(tensor, tensor.options(), at::MemoryFormat::Contiguous);
  }
  c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device()).synchronize();
  return at::empty(tensor.sizes(), tensor.options().device(at::kCPU).pinned_memory(true));
}

void copy_back(const at::Tensor& tensor, const at::Tensor& buffer) {
  if (buffer.is_same(tensor) || buffer.data_ptr() == tensor.data_ptr()) return;
  at::NoGradGuard no_grad;
  at::Tensor(tensor).copy_(buffer);  // to a device: blocking, so the work is done when it says so
}

}  // namespace delta
