// Between tensors and the flat memory that algorithms move.
#pragma once
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "algorithms.hpp"
#include "reduce.hpp"

namespace delta {

// Raise ValueError-like errors (c10::Error) for tensors that cannot be moved.
void check_tensor(const at::Tensor& tensor, const char* collective);
void check_single(const std::vector<at::Tensor>& tensors, const char* collective);
void check_same(const at::Tensor& a, const at::Tensor& b, const char* collective);

Reduction reduction_of(const at::Tensor& tensor, const c10d::ReduceOp& op, const char* collective);
// What is left to do to a reduced tensor: AVG divides by the group's size.
void conclude(at::Tensor& tensor, const c10d::ReduceOp& op, int size);

inline char* bytes_of(const at::Tensor& tensor) { return static_cast<char*>(tensor.data_ptr()); }
inline Span span_of(const at::Tensor& tensor) { return {bytes_of(tensor), tensor.nbytes()}; }
inline ConstSpan const_span_of(const at::Tensor& tensor) { return {bytes_of(tensor), tensor.nbytes()}; }

// Host memory in which the elements lie in order: `tensor` itself if it is so, else a buffer (pinned, for a device's
// tensor). staged() has the tensor's values, dense_like() none. Whoever asked copies back. Both wait for the current
// stream, so that no kernel still uses the tensor when the collective's thread writes to it.
at::Tensor staged(const at::Tensor& tensor);
at::Tensor dense_like(const at::Tensor& tensor);
void copy_back(const at::Tensor& tensor, const at::Tensor& buffer);

}  // namespace delta
