#include "algorithms.hpp"

#include <cstring>
#include <memory>

#include "endpoint.hpp"

namespace delta {
namespace {

// Up to here one exchange of everything with each partner; above, everybody reduces a part.
constexpr size_t kDoublingBytes = 16u << 10;
// How many ring steps are posted ahead: enough that grants and data of the next step never wait for this one.
constexpr size_t kWindow = 3;

MessageKey key(const Operation& op, uint32_t step) {
  return {op.endpoint.epoch(), op.group.id, collective_tag(op.sequence, step)};
}

Peer& member(const Operation& op, int rank) { return *op.group.members[static_cast<size_t>(rank)]; }

// By place among those present: the same as the rank, unless some are absent.
Peer& at(const Operation& op, int place) { return member(op, op.group.present[static_cast<size_t>(place)]); }

int modulo(int value, int n) { return ((value % n) + n) % n; }

// Segment `index` of `count` elements cut into n.
struct Cut {
  size_t count, element;
  int n;
  size_t start(int index) const { return count * static_cast<size_t>(index) / static_cast<size_t>(n) * element; }
  size_t bytes(int index) const { return start(index + 1) - start(index); }
};

// One step of a ring: what goes to the next rank and what comes from the one before.
struct Step {
  std::unique_ptr<Recv> recv;
  std::unique_ptr<Send> send;
  std::vector<char> held;
};

// Runs a ring of `steps` steps. `place(k)` says where step k's incoming bytes go (and what they are reduced with); step
// k + 1 sends on what step k received, while it still arrives.
struct Place {
  char* data = nullptr;
  size_t bytes = 0;
  const char* operand = nullptr;  // set: reduce
  bool hold = false;              // set: into a buffer of the step's own
};

template <class PlaceOf>
Task ring(Operation& op, int steps, ConstSpan first, PlaceOf place_of, Reduction reduction, uint32_t base) {
  int n = op.group.count(), rank = op.group.place;
  Peer& next = at(op, modulo(rank + 1, n));
  Peer& previous = at(op, modulo(rank - 1, n));
  std::vector<Step> window(kWindow);
  for (int k = 0; k < steps + static_cast<int>(kWindow) - 1; k++) {
    if (k < steps) {
      Step& step = window[static_cast<size_t>(k) % kWindow];
      Place place = place_of(k);
      uint32_t tag = base + static_cast<uint32_t>(k);
      if (place.hold) {
        step.held.resize(place.bytes);
        place.data = step.held.data();
      }
      if (place.operand)
        step.recv = std::make_unique<Recv>(op, previous, key(op, tag), place.data, place.bytes, reduction, place.operand);
      else
        step.recv = std::make_unique<Recv>(op, previous, key(op, tag), place.data, place.bytes);
      if (k == 0) {
        step.send = std::make_unique<Send>(op, next, key(op, tag), first.data, first.bytes);
      } else {
        Recv& source = *window[static_cast<size_t>(k - 1) % kWindow].recv;
        step.send = std::make_unique<Send>(op, next, key(op, tag), source.data, source.total, source.moved);
        source.feed(*step.send);
      }
    }
    int oldest = k - static_cast<int>(kWindow) + 1;
    if (oldest < 0) continue;
    // Step `oldest` may be reused: its bytes have come, and have gone on with step oldest + 1.
    Step& step = window[static_cast<size_t>(oldest) % kWindow];
    co_await *step.recv;
    co_await *step.send;
    if (oldest + 1 < steps) {
      Send& on = *window[static_cast<size_t>(oldest + 1) % kWindow].send;
      co_await on;
    }
    step.send.reset();
    step.recv.reset();
  }
}

Task ring_all_reduce(Operation& op, char* data, Cut cut, Reduction reduction) {
  int n = op.group.count(), rank = op.group.place;
  auto place = [=](int k) {
    int index = k < n - 1 ? modulo(rank - k - 1, n) : modulo(rank - (k - (n - 1)), n);
    char* where = data + cut.start(index);
    return Place{where, cut.bytes(index), k < n - 1 ? where : nullptr, false};
  };
  ConstSpan first{data + cut.start(rank), cut.bytes(rank)};
  Task inner = ring(op, 2 * (n - 1), first, place, reduction, 0);
  co_await inner;
}

// For recursive doubling: ranks beyond a power of two fold into a neighbour first, so that `power` pairs and single
// ranks are left, numbered by where they stand.
struct Fold {
  explicit Fold(int n) {
    while (power * 2 <= n) power *= 2;
    extra = n - power;
  }
  int power = 1, extra = 0;
  bool is_folded(int rank) const { return rank < 2 * extra; }
  bool is_out(int rank) const { return is_folded(rank) && rank % 2 == 0; }
  int number(int rank) const { return is_folded(rank) ? rank / 2 : rank - extra; }
  int first(int number) const { return number < extra ? 2 * number : number + extra; }
  int active(int number) const { return number < extra ? 2 * number + 1 : number + extra; }
};

// What a rank does that has folded into the next one.
Task give_and_get(Operation& op, char* data, size_t bytes) {
  Peer& neighbour = at(op, op.group.place + 1);
  {
    Send send(op, neighbour, key(op, 0), data, bytes);
    co_await send;
  }
  Recv recv(op, neighbour, key(op, 63), data, bytes);
  co_await recv;
}

Task doubling_all_reduce(Operation& op, char* data, size_t count, Reduction reduction) {
  int rank = op.group.place;
  size_t bytes = count * reduction.element_bytes;
  Fold fold(op.group.count());
  if (fold.is_out(rank)) {
    Task inner = give_and_get(op, data, bytes);
    co_await inner;
    co_return;
  }
  std::vector<char> theirs(bytes);
  if (fold.is_folded(rank)) {
    Recv recv(op, at(op, rank - 1), key(op, 0), theirs.data(), bytes);
    co_await recv;
    reduction.apply(data, theirs.data(), data, count);
  }
  int number = fold.number(rank);
  uint32_t step = 1;
  for (int distance = 1; distance < fold.power; distance *= 2, step++) {
    int partner = number ^ distance;
    Peer& peer = at(op, fold.active(partner));
    Recv recv(op, peer, key(op, step), theirs.data(), bytes);
    Send send(op, peer, key(op, step), data, bytes);
    co_await recv;
    co_await send;
    if (partner < number)
      reduction.apply(data, theirs.data(), data, count);
    else
      reduction.apply(data, data, theirs.data(), count);
  }
  if (fold.is_folded(rank)) {
    Send send(op, at(op, rank - 1), key(op, 63), data, bytes);
    co_await send;
  }
}

// Everybody's values to everybody by recursive doubling, reduced in rank order by each.
Task gathering_all_reduce(Operation& op, char* data, size_t count, Reduction reduction) {
  int n = op.group.count(), rank = op.group.place;
  size_t bytes = count * reduction.element_bytes;
  Fold fold(n);
  if (fold.is_out(rank)) {
    Task inner = give_and_get(op, data, bytes);
    co_await inner;
    co_return;
  }
  std::vector<char> all(bytes * static_cast<size_t>(n));
  auto of = [&](int whose) { return all.data() + static_cast<size_t>(whose) * bytes; };
  std::memcpy(of(rank), data, bytes);
  if (fold.is_folded(rank)) {
    Recv recv(op, at(op, rank - 1), key(op, 0), of(rank - 1), bytes);
    co_await recv;
  }
  int number = fold.number(rank);
  uint32_t step = 1;
  for (int distance = 1; distance < fold.power; distance *= 2, step++) {
    int partner = number ^ distance;
    Peer& peer = at(op, fold.active(partner));
    int mine = number & ~(distance - 1), theirs = partner & ~(distance - 1);
    auto size = [&](int from) { return static_cast<size_t>(fold.first(from + distance) - fold.first(from)) * bytes; };
    Recv recv(op, peer, key(op, step), of(fold.first(theirs)), size(theirs));
    Send send(op, peer, key(op, step), of(fold.first(mine)), size(mine));
    co_await recv;
    co_await send;
  }
  std::memcpy(data, of(0), bytes);
  for (int whose = 1; whose < n; whose++) reduction.apply(data, data, of(whose), count);
  if (fold.is_folded(rank)) {
    Send send(op, at(op, rank - 1), key(op, 63), data, bytes);
    co_await send;
  }
}

// A chain from rank 0 to the last, which has the result and sends it on around the ring, both while they arrive. A byte
// of the result comes only after this rank's own has gone, so that it may lie in the same place.
Task chain_all_reduce(Operation& op, char* data, size_t bytes, Reduction reduction) {
  int n = op.group.count(), rank = op.group.place;
  Peer& next = at(op, modulo(rank + 1, n));
  Peer& previous = at(op, modulo(rank - 1, n));
  std::unique_ptr<Recv> partial, result;
  std::unique_ptr<Send> partial_on, result_on;
  if (rank > 0) partial = std::make_unique<Recv>(op, previous, key(op, 0), data, bytes, reduction, data);
  if (rank == n - 1) {
    result_on = std::make_unique<Send>(op, next, key(op, 1), data, bytes, partial->moved);
    partial->feed(*result_on);
  } else {
    partial_on = std::make_unique<Send>(op, next, key(op, 0), data, bytes, partial ? partial->moved : bytes);
    if (partial) partial->feed(*partial_on);
    result = std::make_unique<Recv>(op, previous, key(op, 1), data, bytes);
    if (rank < n - 2) {
      result_on = std::make_unique<Send>(op, next, key(op, 1), data, bytes, result->moved);
      result->feed(*result_on);
    }
  }
  if (partial) co_await *partial;
  if (partial_on) co_await *partial_on;
  if (result) co_await *result;
  if (result_on) co_await *result_on;
}

}  // namespace

// Where rounding shows, all values are reduced in rank order, wherever they lie in however large a buffer: DDP has
// other buckets in its first step than later, and a rank that has just been built anew must not round differently.
Task all_reduce(Operation& op, char* data, size_t count, Reduction reduction) {
  int n = op.group.count();
  if (n == 1 || count == 0) co_return;
  size_t bytes = count * reduction.element_bytes;
  bool in_order = reduction.rounds && n > 2;
  bool small = bytes <= kDoublingBytes;
  Task inner = in_order ? small ? gathering_all_reduce(op, data, count, reduction)
                                : chain_all_reduce(op, data, bytes, reduction)
               : small  ? doubling_all_reduce(op, data, count, reduction)
                        : ring_all_reduce(op, data, Cut{count, reduction.element_bytes, n}, reduction);
  co_await inner;
}

// A binomial tree; each rank passes on what it has while the rest arrives.
Task broadcast(Operation& op, int root_rank, Span buffer) {
  int n = op.group.count(), root = op.group.place_of(root_rank);
  if (n == 1 || buffer.bytes == 0) co_return;
  int place = modulo(op.group.place - root, n);
  int mask = 1;
  std::unique_ptr<Recv> recv;
  while (mask < n && !(place & mask)) mask <<= 1;
  if (place != 0)
    recv = std::make_unique<Recv>(op, at(op, modulo(place - mask + root, n)), key(op, 0), buffer.data, buffer.bytes);
  std::vector<std::unique_ptr<Send>> sends;
  if (recv && !recv->large()) co_await *recv;
  for (mask >>= 1; mask > 0; mask >>= 1) {
    if (place + mask >= n) continue;
    Peer& child = at(op, modulo(place + mask + root, n));
    if (recv && recv->large() && sends.empty()) {
      sends.push_back(std::make_unique<Send>(op, child, key(op, 0), buffer.data, buffer.bytes, recv->moved));
      recv->feed(*sends.back());
    } else {
      if (recv) co_await *recv;
      sends.push_back(std::make_unique<Send>(op, child, key(op, 0), buffer.data, buffer.bytes));
    }
  }
  if (recv) co_await *recv;
  for (size_t i = 0; i < sends.size(); i++) co_await *sends[i];
}

// A chain that ends at the root, in rank order from root + 1; partial sums are passed on while they arrive.
Task reduce(Operation& op, int root_rank, char* data, size_t count, Reduction reduction) {
  int n = op.group.count(), root = op.group.place_of(root_rank);
  if (n == 1 || count == 0) co_return;
  size_t bytes = count * reduction.element_bytes;
  int place = modulo(op.group.place - root - 1, n);  // the root is n - 1
  std::vector<char> held;
  char* where = data;
  if (place > 0 && place < n - 1) {
    held.resize(bytes);
    where = held.data();
  }
  std::unique_ptr<Recv> recv;
  if (place > 0)
    recv = std::make_unique<Recv>(op, at(op, modulo(op.group.place - 1, n)), key(op, 0), where, bytes, reduction, data);
  std::unique_ptr<Send> send;
  if (place < n - 1) {
    send = std::make_unique<Send>(op, at(op, modulo(op.group.place + 1, n)), key(op, 0), where, bytes,
                                  recv ? recv->moved : bytes);
    if (recv) recv->feed(*send);
  }
  if (recv) co_await *recv;
  if (send) co_await *send;
}

Task all_gather(Operation& op, std::vector<Span> parts) {
  int n = op.group.count(), rank = op.group.place;
  if (n == 1) co_return;
  auto place = [&parts, n, rank](int k) {
    Span part = parts[static_cast<size_t>(modulo(rank - k - 1, n))];
    return Place{part.data, part.bytes, nullptr, false};
  };
  Span own = parts[static_cast<size_t>(rank)];
  Task inner = ring(op, n - 1, ConstSpan{own.data, own.bytes}, place, Reduction{}, 0);
  co_await inner;
}

Task reduce_scatter(Operation& op, std::vector<ConstSpan> parts, char* out, Reduction reduction) {
  int n = op.group.count(), rank = op.group.place;
  ConstSpan own = parts[static_cast<size_t>(rank)];
  if (n == 1) {
    if (own.bytes > 0 && out != own.data) std::memmove(out, own.data, own.bytes);
    co_return;
  }
  auto place = [&parts, n, rank, out](int k) {
    ConstSpan part = parts[static_cast<size_t>(modulo(rank - k - 2, n))];
    bool last = k == n - 2;
    return Place{last ? out : nullptr, part.bytes, part.data, !last};
  };
  ConstSpan first = parts[static_cast<size_t>(modulo(rank - 1, n))];
  Task inner = ring(op, n - 1, first, place, reduction, 0);
  co_await inner;
}

Task gather(Operation& op, int root, ConstSpan own, std::vector<Span> parts) {
  int n = op.group.count();
  if (op.group.place != root) {
    Send send(op, at(op, root), key(op, 0), own.data, own.bytes);
    co_await send;
    co_return;
  }
  std::vector<std::unique_ptr<Recv>> recvs;
  for (int rank = 0; rank < n; rank++)
    if (rank != root) {
      Span part = parts[static_cast<size_t>(rank)];
      recvs.push_back(std::make_unique<Recv>(op, at(op, rank), key(op, 0), part.data, part.bytes));
    }
  for (size_t i = 0; i < recvs.size(); i++) co_await *recvs[i];
}

Task scatter(Operation& op, int root, Span own, std::vector<ConstSpan> parts) {
  int n = op.group.count();
  if (op.group.place != root) {
    Recv recv(op, at(op, root), key(op, 0), own.data, own.bytes);
    co_await recv;
    co_return;
  }
  std::vector<std::unique_ptr<Send>> sends;
  for (int rank = 0; rank < n; rank++)
    if (rank != root) {
      ConstSpan part = parts[static_cast<size_t>(rank)];
      sends.push_back(std::make_unique<Send>(op, at(op, rank), key(op, 0), part.data, part.bytes));
    }
  for (size_t i = 0; i < sends.size(); i++) co_await *sends[i];
}

Task all_to_all(Operation& op, std::vector<ConstSpan> out, std::vector<Span> in) {
  constexpr int kAtOnce = 8;  // partners
  int n = op.group.count(), rank = op.group.place;
  for (int first = 1; first < n; first += kAtOnce) {
    std::vector<std::unique_ptr<Recv>> recvs;
    std::vector<std::unique_ptr<Send>> sends;
    for (int k = first; k < n && k < first + kAtOnce; k++) {
      int to = modulo(rank + k, n), from = modulo(rank - k, n);
      Span incoming = in[static_cast<size_t>(from)];
      ConstSpan outgoing = out[static_cast<size_t>(to)];
      if (incoming.bytes > 0)
        recvs.push_back(std::make_unique<Recv>(op, at(op, from), key(op, 0), incoming.data, incoming.bytes));
      if (outgoing.bytes > 0)
        sends.push_back(std::make_unique<Send>(op, at(op, to), key(op, 0), outgoing.data, outgoing.bytes));
    }
    for (size_t i = 0; i < recvs.size(); i++) co_await *recvs[i];
    for (size_t i = 0; i < sends.size(); i++) co_await *sends[i];
  }
}

// Dissemination: after step k everybody has heard, directly or not, from 2^k ranks before it.
Task barrier(Operation& op) {
  int n = op.group.count(), rank = op.group.place;
  uint32_t step = 0;
  for (int distance = 1; distance < n; distance *= 2, step++) {
    Recv recv(op, at(op, modulo(rank - distance, n)), key(op, step), nullptr, 0);
    Send send(op, at(op, modulo(rank + distance, n)), key(op, step), nullptr, 0);
    co_await recv;
    co_await send;
  }
}

Task monitored_barrier(Operation& op) {
  if (op.group.place != 0) {
    {
      Send here(op, at(op, 0), key(op, 0), nullptr, 0);
      co_await here;
    }
    Recv go(op, at(op, 0), key(op, 1), nullptr, 0);
    co_await go;
    co_return;
  }
  std::vector<std::unique_ptr<Recv>> reports;
  for (int rank = 1; rank < op.group.count(); rank++)
    reports.push_back(std::make_unique<Recv>(op, at(op, rank), key(op, 0), nullptr, 0));
  for (size_t i = 0; i < reports.size(); i++) co_await *reports[i];
  std::vector<std::unique_ptr<Send>> releases;
  for (int rank = 1; rank < op.group.count(); rank++)
    releases.push_back(std::make_unique<Send>(op, at(op, rank), key(op, 1), nullptr, 0));
  for (size_t i = 0; i < releases.size(); i++) co_await *releases[i];
}

Task send_to(Operation& op, int to, uint32_t tag, ConstSpan data) {
  MessageKey message{op.endpoint.epoch(), op.group.id, point_to_point_tag(tag, 0)};
  Send send(op, member(op, to), message, data.data, data.bytes);
  co_await send;
}

Task recv_from(Operation& op, int from, uint32_t tag, Span data) {
  Recv recv(op, from < 0 ? nullptr : &member(op, from), tag, data.data, data.bytes);
  co_await recv;
}

}  // namespace delta
