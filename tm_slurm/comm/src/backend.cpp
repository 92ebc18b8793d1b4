#include "backend.hpp"

#include "backend_tensors.hpp"
#include "errors.hpp"

#include <string_view>

namespace delta {
namespace {

struct DeltaOptions final : c10d::Backend::Options {
  explicit DeltaOptions(std::chrono::milliseconds timeout) : Options("tm", timeout) {}
};

}  // namespace

DeltaBackend::DeltaBackend(std::shared_ptr<Endpoint> endpoint, std::string name, uint64_t id, int rank,
                           std::vector<int> ranks, std::chrono::milliseconds timeout, int ordinal)
    : Backend(rank, static_cast<int>(ranks.size())),
      endpoint_(std::move(endpoint)),
      ordinal_(ordinal),
      timeout_ms_(timeout.count()) {
  group_.id = id;
  group_.rank = rank;
  group_.ranks = std::move(ranks);
  group_.name = std::move(name);
  endpoint_->add_group(group_);
}

DeltaBackend::~DeltaBackend() { endpoint_->remove_group(group_); }

c10::intrusive_ptr<c10d::Backend::Options> DeltaBackend::getBackendOptions() {
  return c10::make_intrusive<DeltaOptions>(std::chrono::milliseconds(timeout_ms_));
}

void DeltaBackend::abort() { endpoint_->abort_group(group_); }

std::chrono::milliseconds DeltaBackend::limit(std::chrono::milliseconds wanted) const {
  return wanted == c10d::kUnsetTimeout ? std::chrono::milliseconds(timeout_ms_) : wanted;
}

DeltaBackend::WorkPtr DeltaBackend::start(c10d::OpType type, const char* title, Tensors outputs,
                                          std::chrono::milliseconds timeout, std::vector<Piece> pieces,
                                          bool collective, int peer, bool recorded) {
  std::function<void(int)> ended;
  std::function<void(const Failure&)> alone;
  if (in_sandbox()) {
    timeout = std::min(timeout, endpoint_->sharing_limit());
    alone = or_alone(title, outputs, peer);
  } else if (Tape* tape = endpoint_->tape.load(std::memory_order_acquire); tape && recorded) {
    ended = note(*tape, title, outputs, pieces.size(), peer);
  }
  auto work = c10::make_intrusive<DeltaWork>(endpoint_, getRank(), type, title, std::move(outputs), pieces.size());
  for (Piece& piece : pieces) {
    Launch launch;
    launch.name = title + 3;  // without "tm:"
    launch.timeout = timeout;
    launch.collective = collective;
    launch.body = std::move(piece.body);
    launch.finished = [work, ended, alone, after = std::move(piece.after), keep = std::move(piece.keep)](
                          const Failure* failure, int source_rank) {
      if (failure && alone) {
        alone(*failure);
        return work->piece_done(nullptr, source_rank);
      }
      if (failure || (!after && !ended)) return work->piece_done(failure, source_rank);
      try {
        if (after) after();
        if (ended) ended(source_rank);
      } catch (const std::exception& error) {
        Failure late{Fault::kFailed, error.what(), -1};
        return work->piece_done(&late, source_rank);
      }
      work->piece_done(nullptr, source_rank);
    };
    work->sequence = endpoint_->launch(group_, std::move(launch));
  }
  sequence_ = work->sequence + 1;
  return work;
}

std::function<void(int)> DeltaBackend::note(Tape& tape, const char* title, const Tensors& outputs, size_t pieces,
                                            int peer) {
  size_t place = tape.reserve(title, ordinal_, peer, outputs);
  auto left = std::make_shared<std::atomic<size_t>>(pieces);
  return [this_rank = getRank(), size = getSize(), &tape, place, outputs, left](int source_rank) {
    if (left->fetch_sub(1) > 1) return;
    tape.fill(place, outputs, source_rank < 0 ? kNoPeer : (source_rank - this_rank + size) % size);
  };
}

std::function<void(const Failure&)> DeltaBackend::or_alone(const char* title, const Tensors& outputs, int peer) {
  auto done = std::make_shared<std::atomic<bool>>(false);
  return [endpoint = endpoint_, ordinal = ordinal_, title, outputs, peer, done](const Failure& failure) {
    if (done->exchange(true)) return;
    endpoint->stop_sharing(failure.message);
    play(*endpoint, title, ordinal, peer, outputs);
  };
}

int DeltaBackend::play(Endpoint& endpoint, const char* title, int ordinal, int peer, const Tensors& outputs) {
  int source = kNoPeer;
  bool has_outputs = !outputs.empty() && std::string_view(title) != "tm:send";
  if (Tape* tape = endpoint.tape.load(std::memory_order_acquire); tape && tape->plays() && has_outputs)
    tape->answer(title, ordinal, peer, outputs, &source);
  return source;
}

DeltaBackend::WorkPtr DeltaBackend::answer_alone(c10d::OpType type, const char* title, Tensors outputs, int peer) {
  int source = play(*endpoint_, title, ordinal_, peer, outputs);
  if (source >= 0) source = (source + getRank()) % getSize();
  auto work = c10::make_intrusive<DeltaWork>(endpoint_, getRank(), type, title, std::move(outputs), 1);
  work->piece_done(nullptr, source);
  return work;
}

void DeltaBackend::check_whole(const char* collective) {
  std::vector<int> absent = endpoint_->absent_of(group_);
  TORCH_CHECK(absent.empty(), collective, ": every rank's part is needed, and ", absent.size() == 1 ? "rank " : "ranks ",
              c10::Join(", ", absent), " of group ", group_.name,
              " cannot bring theirs: they were dropped for want of a standby (policy.on_no_standby: shrink); only "
              "allreduce, reduce, broadcast and barrier go on without them");
}

void DeltaBackend::check_present(int rank, const char* call) {
  int global = group_.ranks[static_cast<size_t>(rank)];
  for (int absent : endpoint_->absent_of(group_))
    TORCH_CHECK(absent != global, call, ": rank ", global, " of group ", group_.name,
                " was dropped for want of a standby (policy.on_no_standby: shrink)");
}

DeltaBackend::Piece DeltaBackend::all_reduce_piece(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  Reduction reduction = reduction_of(tensor, op, "allreduce");
  at::Tensor flat = staged(tensor);
  char* data = bytes_of(flat);
  size_t count = static_cast<size_t>(flat.numel());
  Piece piece;
  piece.body = [=](Operation& operation) { return all_reduce(operation, data, count, reduction); };
  piece.keep = {flat};
  if (op.op_ == c10d::ReduceOp::AVG || !flat.is_same(tensor))
    piece.after = [tensor, flat, op, size = getSize()]() mutable {
      conclude(flat, op, size);
      copy_back(tensor, flat);
    };
  return piece;
}

DeltaBackend::WorkPtr DeltaBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  check_single(tensors, "allreduce");
  if (sandboxed()) return answer_alone(c10d::OpType::ALLREDUCE, "tm:all_reduce", tensors);
  std::vector<Piece> pieces{all_reduce_piece(tensors[0], options.reduceOp)};
  return start(c10d::OpType::ALLREDUCE, "tm:all_reduce", tensors, limit(options.timeout), std::move(pieces));
}

DeltaBackend::WorkPtr DeltaBackend::allreduce_coalesced(Tensors& tensors,
                                                        const c10d::AllreduceCoalescedOptions& options) {
  for (const at::Tensor& tensor : tensors) check_tensor(tensor, "allreduce_coalesced");
  if (sandboxed() || tensors.empty())
    return answer_alone(c10d::OpType::ALLREDUCE_COALESCED, "tm:all_reduce_coalesced", tensors);
  std::vector<Piece> pieces;
  for (const at::Tensor& tensor : tensors) pieces.push_back(all_reduce_piece(tensor, options.reduceOp));
  return start(c10d::OpType::ALLREDUCE_COALESCED, "tm:all_reduce_coalesced", tensors, limit(options.timeout),
               std::move(pieces));
}

DeltaBackend::WorkPtr DeltaBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  check_single(tensors, "broadcast");
  TORCH_CHECK(options.rootRank >= 0 && options.rootRank < getSize(), "broadcast: expected a root rank below ",
              getSize(), ", found ", options.rootRank);
  if (sandboxed()) return answer_alone(c10d::OpType::BROADCAST, "tm:broadcast", tensors);
  at::Tensor tensor = tensors[0];
  int root = endpoint_->stand_in(group_, static_cast<int>(options.rootRank));
  at::Tensor flat = root == getRank() ? staged(tensor) : dense_like(tensor);
  Span span = span_of(flat);
  Piece piece;
  piece.body = [=](Operation& operation) { return delta::broadcast(operation, root, span); };
  piece.keep = {flat};
  if (root != getRank()) piece.after = [tensor, flat] { copy_back(tensor, flat); };
  std::vector<Piece> pieces;
  pieces.push_back(std::move(piece));
  return start(c10d::OpType::BROADCAST, "tm:broadcast", tensors, limit(options.timeout), std::move(pieces));
}

DeltaBackend::WorkPtr DeltaBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  check_single(tensors, "reduce");
  TORCH_CHECK(options.rootRank >= 0 && options.rootRank < getSize(), "reduce: expected a root rank below ", getSize(),
              ", found ", options.rootRank);
  if (sandboxed()) return answer_alone(c10d::OpType::REDUCE, "tm:reduce", tensors);
  at::Tensor tensor = tensors[0];
  c10d::ReduceOp op = options.reduceOp;
  Reduction reduction = reduction_of(tensor, op, "reduce");
  at::Tensor flat = staged(tensor);
  char* data = bytes_of(flat);
  size_t count = static_cast<size_t>(flat.numel());
  int root = static_cast<int>(options.rootRank);
  Piece piece;
  piece.body = [=](Operation& operation) { return delta::reduce(operation, root, data, count, reduction); };
  piece.keep = {flat};
  if (root == getRank())
    piece.after = [tensor, flat, op, size = getSize()]() mutable {
      conclude(flat, op, size);
      copy_back(tensor, flat);
    };
  std::vector<Piece> pieces;
  pieces.push_back(std::move(piece));
  return start(c10d::OpType::REDUCE, "tm:reduce", tensors, limit(options.timeout), std::move(pieces));
}

DeltaBackend::WorkPtr DeltaBackend::barrier(const c10d::BarrierOptions& options) {
  if (sandboxed()) return answer_alone(c10d::OpType::BARRIER, "tm:barrier", {});
  Piece piece;
  piece.body = [](Operation& operation) { return delta::barrier(operation); };
  std::vector<Piece> pieces;
  pieces.push_back(std::move(piece));
  return start(c10d::OpType::BARRIER, "tm:barrier", {}, limit(options.timeout), std::move(pieces));
}

void DeltaBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool /* always all ranks */) {
  if (sandboxed()) return;
  Piece piece;
  piece.body = [](Operation& operation) { return monitored_barrier(operation); };
  std::vector<Piece> pieces;
  pieces.push_back(std::move(piece));
  start(c10d::OpType::BARRIER, "tm:monitored_barrier", {}, limit(options.timeout), std::move(pieces))->wait();
}

DeltaBackend::WorkPtr DeltaBackend::send(Tensors& tensors, int to, int tag) {
  check_single(tensors, "send");
  TORCH_CHECK(to >= 0 && to < getSize() && to != getRank(), "send: expected another rank below ", getSize(),
              ", found ", to);
  TORCH_CHECK(tag >= 0, "send: expected a tag of 0 or more, found ", tag);
  if (sandboxed(to)) return answer_alone(c10d::OpType::SEND, "tm:send", tensors);
  check_present(to, "send");
  at::Tensor flat = staged(tensors[0]);
  ConstSpan span = const_span_of(flat);
  Piece piece;
  piece.body = [=](Operation& operation) { return send_to(operation, to, static_cast<uint32_t>(tag), span); };
  piece.keep = {flat};
  std::vector<Piece> pieces;
  pieces.push_back(std::move(piece));
  return start(c10d::OpType::SEND, "tm:send", tensors, limit(c10d::kUnsetTimeout), std::move(pieces), false,
               kNoPeer, false);
}

DeltaBackend::WorkPtr DeltaBackend::receive(Tensors& tensors, int from, int tag, c10d::OpType type) {
  check_single(tensors, "recv");
  TORCH_CHECK(tag >= 0, "recv: expected a tag of 0 or more, found ", tag);
  if (sandboxed(from)) return answer_alone(type, "tm:recv", tensors, distance(from));
  if (from >= 0) check_present(from, "recv");
  at::Tensor tensor = tensors[0], flat = dense_like(tensor);
  Span span = span_of(flat);
  Piece piece;
  piece.body = [=](Operation& operation) { return recv_from(operation, from, static_cast<uint32_t>(tag), span); };
  piece.keep = {flat};
  piece.after = [tensor, flat] { copy_back(tensor, flat); };
  std::vector<Piece> pieces;
  pieces.push_back(std::move(piece));
  return start(type, "tm:recv", tensors, limit(c10d::kUnsetTimeout), std::move(pieces), false, distance(from),
               tag != kUnrecordedTag);
}

DeltaBackend::WorkPtr DeltaBackend::recv(Tensors& tensors, int from, int tag) {
  TORCH_CHECK(from >= 0 && from < getSize() && from != getRank(), "recv: expected another rank below ", getSize(),
              ", found ", from);
  return receive(tensors, from, tag, c10d::OpType::RECV);
}

DeltaBackend::WorkPtr DeltaBackend::recvAnysource(Tensors& tensors, int tag) {
  return receive(tensors, -1, tag, c10d::OpType::RECVANYSOURCE);
}

}  // namespace delta
