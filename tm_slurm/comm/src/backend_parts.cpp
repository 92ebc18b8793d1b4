// The collectives with one part a rank: gather, scatter, reduce-scatter, all-to-all.
#include "backend.hpp"
#include "backend_tensors.hpp"

namespace delta {
namespace {

void check_parts(const std::vector<at::Tensor>& parts, int size, const at::Tensor& like, const char* collective) {
  TORCH_CHECK(static_cast<int>(parts.size()) == size, collective, ": expected ", size, " tensors, one a rank, found ",
              parts.size());
  for (const at::Tensor& part : parts) check_same(like, part, collective);
}

// Buffers in order for a list of outputs.
std::vector<at::Tensor> dense(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> buffers;
  buffers.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) buffers.push_back(dense_like(tensor));
  return buffers;
}

std::function<void()> copy_all_back(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& buffers) {
  return [tensors, buffers] {
    for (size_t i = 0; i < tensors.size(); i++) copy_back(tensors[i], buffers[i]);
  };
}

std::vector<Span> spans(const std::vector<at::Tensor>& tensors) {
  std::vector<Span> out;
  for (const at::Tensor& tensor : tensors) out.push_back(span_of(tensor));
  return out;
}

std::vector<ConstSpan> const_spans(const std::vector<at::Tensor>& tensors) {
  std::vector<ConstSpan> out;
  for (const at::Tensor& tensor : tensors) out.push_back(const_span_of(tensor));
  return out;
}

void place(const at::Tensor& to, const at::Tensor& from) {
  if (to.data_ptr() == from.data_ptr() && to.is_contiguous() && from.is_contiguous()) return;
  at::NoGradGuard no_grad;
  at::Tensor(to).copy_(from.reshape(to.sizes()));
}

}  // namespace

DeltaBackend::Piece DeltaBackend::all_gather_piece(const Tensors& outputs, const at::Tensor& input) {
  check_tensor(input, "allgather");
  check_parts(outputs, getSize(), input, "allgather");
  check_whole("allgather");
  for (const at::Tensor& output : outputs)
    TORCH_CHECK(output.numel() == input.numel(), "allgather: expected outputs of ", input.numel(),
                " elements like the input, found ", output.numel());
  Tensors buffers = dense(outputs);
  place(buffers[static_cast<size_t>(getRank())], input);
  Piece piece;
  piece.body = [parts = spans(buffers)](Operation& operation) { return all_gather(operation, parts); };
  piece.after = copy_all_back(outputs, buffers);
  piece.keep = buffers;
  return piece;
}

DeltaBackend::Piece DeltaBackend::all_gather_base_piece(const at::Tensor& output, const at::Tensor& input) {
  check_tensor(output, "allgather_into_tensor");
  check_same(output, input, "allgather_into_tensor");
  check_whole("allgather_into_tensor");
  TORCH_CHECK(output.numel() == input.numel() * getSize(), "allgather_into_tensor: expected an output of ",
              input.numel() * getSize(), " elements, found ", output.numel());
  at::Tensor buffer = dense_like(output);
  size_t bytes = input.nbytes();
  std::vector<Span> parts;
  for (int rank = 0; rank < getSize(); rank++) parts.push_back({bytes_of(buffer) + bytes * static_cast<size_t>(rank), bytes});
  at::Tensor own = buffer.view({-1}).narrow(0, input.numel() * getRank(), input.numel());
  place(own, input.reshape({-1}));
  Piece piece;
  piece.body = [parts](Operation& operation) { return all_gather(operation, parts); };
  piece.keep = {buffer};
  piece.after = [output, buffer] { copy_back(output, buffer); };
  return piece;
}

DeltaBackend::Piece DeltaBackend::reduce_scatter_piece(const at::Tensor& output, const Tensors& inputs,
                                                       const c10d::ReduceOp& op) {
  check_tensor(output, "reduce_scatter");
  check_parts(inputs, getSize(), output, "reduce_scatter");
  check_whole("reduce_scatter");
  TORCH_CHECK(inputs[static_cast<size_t>(getRank())].numel() == output.numel(), "reduce_scatter: expected an output of ",
              inputs[static_cast<size_t>(getRank())].numel(), " elements, found ", output.numel());
  Reduction reduction = reduction_of(output, op, "reduce_scatter");
  Tensors flat;
  for (const at::Tensor& input : inputs) flat.push_back(staged(input));
  at::Tensor buffer = dense_like(output);
  Piece piece;
  piece.body = [parts = const_spans(flat), out = bytes_of(buffer), reduction](Operation& operation) {
    return delta::reduce_scatter(operation, parts, out, reduction);
  };
  piece.after = [output, buffer, op, size = getSize()]() mutable {
    conclude(buffer, op, size);
    copy_back(output, buffer);
  };
  flat.push_back(buffer);
  piece.keep = std::move(flat);
  return piece;
}

DeltaBackend::Piece DeltaBackend::reduce_scatter_base_piece(const at::Tensor& output, const at::Tensor& input,
                                                            const c10d::ReduceOp& op) {
  check_tensor(output, "reduce_scatter_tensor");
  check_same(output, input, "reduce_scatter_tensor");
  TORCH_CHECK(input.numel() == output.numel() * getSize(), "reduce_scatter_tensor: expected an input of ",
              output.numel() * getSize(), " elements, found ", input.numel());
  at::Tensor flat = staged(input).view({-1});
  Tensors parts;
  for (int rank = 0; rank < getSize(); rank++) parts.push_back(flat.narrow(0, output.numel() * rank, output.numel()));
  return reduce_scatter_piece(output, parts, op);
}

DeltaBackend::WorkPtr DeltaBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) {
  check_single(inputs, "allgather");
  TORCH_CHECK(outputs.size() == 1, "allgather: expected one list of outputs, found ", outputs.size());
  if (sandboxed()) {
    for (const at::Tensor& output : outputs[0]) place(output, inputs[0]);
    return answer_alone(c10d::OpType::ALLGATHER, "tm:all_gather", outputs[0]);
  }
  std::vector<Piece> pieces{all_gather_piece(outputs[0], inputs[0])};
  return start(c10d::OpType::ALLGATHER, "tm:all_gather", outputs[0], limit(options.timeout), std::move(pieces));
}

DeltaBackend::WorkPtr DeltaBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                        const c10d::AllgatherOptions& options) {
  // c10d's shape for this one: outputs[rank][i] belongs to inputs[i].
  TORCH_CHECK(static_cast<int>(outputs.size()) == getSize(), "allgather_coalesced: expected ", getSize(),
              " lists of outputs, found ", outputs.size());
  std::vector<Piece> pieces;
  Tensors all;
  for (size_t i = 0; i < inputs.size(); i++) {
    Tensors mine;
    for (const Tensors& list : outputs) {
      TORCH_CHECK(list.size() == inputs.size(), "allgather_coalesced: expected ", inputs.size(), " outputs a rank");
      mine.push_back(list[i]);
    }
    if (sandboxed())
      for (const at::Tensor& output : mine) place(output, inputs[i]);
    else
      pieces.push_back(all_gather_piece(mine, inputs[i]));
    all.insert(all.end(), mine.begin(), mine.end());
  }
  if (pieces.empty()) return answer_alone(c10d::OpType::ALLGATHER_COALESCED, "tm:all_gather_coalesced", all);
  return start(c10d::OpType::ALLGATHER_COALESCED, "tm:all_gather_coalesced", all, limit(options.timeout),
               std::move(pieces));
}

DeltaBackend::WorkPtr DeltaBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                    const c10d::AllgatherOptions& options) {
  Tensors outputs{output}, inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

DeltaBackend::WorkPtr DeltaBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                    const c10d::AllgatherOptions& options) {
  TORCH_CHECK(outputs.size() == inputs.size(), "allgather_into_tensor: expected as many outputs as inputs");
  std::vector<Piece> pieces;
  for (size_t i = 0; i < inputs.size(); i++) {
    if (!sandboxed()) {
      pieces.push_back(all_gather_base_piece(outputs[i], inputs[i]));
      continue;
    }
    at::Tensor repeated = inputs[i].reshape({1, -1}).expand({getSize(), inputs[i].numel()});
    place(outputs[i], repeated);
  }
  if (pieces.empty()) return answer_alone(c10d::OpType::_ALLGATHER_BASE, "tm:all_gather_into_tensor", outputs);
  return start(c10d::OpType::_ALLGATHER_BASE, "tm:all_gather_into_tensor", outputs, limit(options.timeout),
               std::move(pieces));
}

DeltaBackend::WorkPtr DeltaBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                   const c10d::ReduceScatterOptions& options) {
  check_single(outputs, "reduce_scatter");
  TORCH_CHECK(inputs.size() == 1, "reduce_scatter: expected one list of inputs, found ", inputs.size());
  if (sandboxed()) {
    place(outputs[0], inputs[0].at(static_cast<size_t>(getRank())));
    return answer_alone(c10d::OpType::REDUCE_SCATTER, "tm:reduce_scatter", outputs);
  }
  std::vector<Piece> pieces{reduce_scatter_piece(outputs[0], inputs[0], options.reduceOp)};
  return start(c10d::OpType::REDUCE_SCATTER, "tm:reduce_scatter", outputs, limit(options.timeout), std::move(pieces));
}

DeltaBackend::WorkPtr DeltaBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                         const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output}, inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

DeltaBackend::WorkPtr DeltaBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                    const c10d::ReduceScatterOptions& options) {
  TORCH_CHECK(outputs.size() == inputs.size(), "reduce_scatter_tensor: expected as many outputs as inputs");
  std::vector<Piece> pieces;
  for (size_t i = 0; i < inputs.size(); i++) {
    if (sandboxed())
      place(outputs[i], inputs[i].reshape({-1}).narrow(0, outputs[i].numel() * getRank(), outputs[i].numel()));
    else
      pieces.push_back(reduce_scatter_base_piece(outputs[i], inputs[i], options.reduceOp));
  }
  if (pieces.empty()) return answer_alone(c10d::OpType::_REDUCE_SCATTER_BASE, "tm:reduce_scatter_tensor", outputs);
  return start(c10d::OpType::_REDUCE_SCATTER_BASE, "tm:reduce_scatter_tensor", outputs, limit(options.timeout),
               std::move(pieces));
}

DeltaBackend::WorkPtr DeltaBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                           const c10d::GatherOptions& options) {
  check_single(inputs, "gather");
  bool root = options.rootRank == getRank();
  TORCH_CHECK(!root || outputs.size() == 1, "gather: the root needs one list of outputs, found ", outputs.size());
  Tensors results = root ? outputs[0] : Tensors{};
  if (sandboxed()) {
    for (const at::Tensor& output : results) place(output, inputs[0]);
    return answer_alone(c10d::OpType::GATHER, "tm:gather", results);
  }
  check_whole("gather");
  if (root) check_parts(results, getSize(), inputs[0], "gather");
  Tensors buffers = dense(results);
  at::Tensor own = staged(inputs[0]);
  if (root) place(buffers[static_cast<size_t>(getRank())], own);
  Piece piece;
  piece.body = [parts = spans(buffers), span = const_span_of(own),
                to = static_cast<int>(options.rootRank)](Operation& operation) {
    return delta::gather(operation, to, span, parts);
  };
  piece.after = copy_all_back(results, buffers);
  piece.keep = buffers;
  piece.keep.push_back(own);
  std::vector<Piece> pieces;
  pieces.push_back(std::move(piece));
  return start(c10d::OpType::GATHER, "tm:gather", results, limit(options.timeout), std::move(pieces));
}

DeltaBackend::WorkPtr DeltaBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                            const c10d::ScatterOptions& options) {
  check_single(outputs, "scatter");
  bool root = options.rootRank == getRank();
  TORCH_CHECK(!root || inputs.size() == 1, "scatter: the root needs one list of inputs, found ", inputs.size());
  if (sandboxed()) {
    if (root) place(outputs[0], inputs[0].at(static_cast<size_t>(getRank())));
    return answer_alone(c10d::OpType::SCATTER, "tm:scatter", outputs);
  }
  check_whole("scatter");
  if (root) check_parts(inputs[0], getSize(), outputs[0], "scatter");
  Tensors flat;
  if (root)
    for (const at::Tensor& input : inputs[0]) flat.push_back(staged(input));
  at::Tensor output = outputs[0], buffer = dense_like(output);
  if (root) place(buffer, flat[static_cast<size_t>(getRank())]);
  Piece piece;
  piece.body = [parts = const_spans(flat), span = span_of(buffer),
                from = static_cast<int>(options.rootRank)](Operation& operation) {
    return delta::scatter(operation, from, span, parts);
  };
  piece.after = [output, buffer] { copy_back(output, buffer); };
  piece.keep = flat;
  piece.keep.push_back(buffer);
  std::vector<Piece> pieces;
  pieces.push_back(std::move(piece));
  return start(c10d::OpType::SCATTER, "tm:scatter", outputs, limit(options.timeout), std::move(pieces));
}

DeltaBackend::WorkPtr DeltaBackend::alltoall_base(at::Tensor& output, at::Tensor& input, Splits& output_splits,
                                                  Splits& input_splits, const c10d::AllToAllOptions& options) {
  check_tensor(output, "alltoall_base");
  check_same(output, input, "alltoall_base");
  auto cut = [&](const at::Tensor& tensor, const Splits& splits, const char* what) {
    int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
    Tensors parts;
    if (splits.empty()) {
      TORCH_CHECK(rows % getSize() == 0, "alltoall_base: expected the first dimension of the ", what,
                  " to be a multiple of ", getSize(), ", found ", rows);
      for (int rank = 0; rank < getSize(); rank++)
        parts.push_back(tensor.narrow(0, rows / getSize() * rank, rows / getSize()));
      return parts;
    }
    int64_t at = 0;
    TORCH_CHECK(static_cast<int>(splits.size()) == getSize(), "alltoall_base: expected ", getSize(), " split sizes of the ",
                what, ", found ", splits.size());
    for (int64_t split : splits) {
      TORCH_CHECK(split >= 0 && at + split <= rows, "alltoall_base: the ", what, "'s split sizes must add up to ", rows);
      parts.push_back(tensor.narrow(0, at, split));
      at += split;
    }
    TORCH_CHECK(at == rows, "alltoall_base: the ", what, "'s split sizes add up to ", at, ", expected ", rows);
    return parts;
  };
  Tensors outputs = cut(output, output_splits, "output"), inputs = cut(input, input_splits, "input");
  if (sandboxed() && outputs[static_cast<size_t>(getRank())].numel() != inputs[static_cast<size_t>(getRank())].numel())
    return answer_alone(c10d::OpType::ALLTOALL, "tm:all_to_all", outputs);
  return alltoall(outputs, inputs, options);
}

DeltaBackend::WorkPtr DeltaBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  TORCH_CHECK(static_cast<int>(outputs.size()) == getSize(), "alltoall: expected ", getSize(), " outputs, found ",
              outputs.size());
  for (const at::Tensor& output : outputs) check_tensor(output, "alltoall");
  check_parts(inputs, getSize(), outputs[0], "alltoall");
  check_whole("alltoall");
  if (sandboxed()) {
    for (size_t i = 0; i < outputs.size(); i++)
      if (outputs[i].numel() == inputs[i].numel()) place(outputs[i], inputs[i]);
    return answer_alone(c10d::OpType::ALLTOALL, "tm:all_to_all", outputs);
  }
  size_t own = static_cast<size_t>(getRank());
  TORCH_CHECK(outputs[own].numel() == inputs[own].numel(), "alltoall: this rank's own part has ", inputs[own].numel(),
              " elements in the inputs and ", outputs[own].numel(), " in the outputs");
  Tensors buffers = dense(outputs), flat;
  for (const at::Tensor& input : inputs) flat.push_back(staged(input));
  place(buffers[own], flat[own]);
  Piece piece;
  piece.body = [out = const_spans(flat), in = spans(buffers)](Operation& operation) {
    return all_to_all(operation, out, in);
  };
  piece.after = copy_all_back(outputs, buffers);
  piece.keep = flat;
  piece.keep.insert(piece.keep.end(), buffers.begin(), buffers.end());
  std::vector<Piece> pieces;
  pieces.push_back(std::move(piece));
  return start(c10d::OpType::ALLTOALL, "tm:all_to_all", outputs, limit(options.timeout), std::move(pieces));
}

}  // namespace delta
