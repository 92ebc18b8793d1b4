#include "transfer.hpp"

#include <algorithm>
#include <cstring>

#include "endpoint.hpp"

namespace delta {
namespace {
constexpr size_t kSmallestPiece = 64u << 10;  // of a message that is passed on while it still arrives
}

Send::Send(Operation& op, Peer& p, MessageKey k, const char* d, size_t bytes, size_t ready)
    : Transfer(op, &p, k, bytes), data(d), available(ready), granted(!large()), offered(false) {
  op.endpoint.post(*this);
}

Send::Send(Operation& op, Peer& p, MessageKey k, const char* d, size_t bytes) : Send(op, p, k, d, bytes, bytes) {}

Send::~Send() {
  if (!done || busy) operation.endpoint.withdraw(*this);
}

bool Send::has_frame() const {
  if (done) return false;
  if (total == 0) return true;
  if (is_point_to_point(key.tag) && !offered) return true;
  if (!granted) return false;
  size_t ready = available - moved;
  return ready > 0 && ready >= std::min(total - moved, kSmallestPiece);
}

void Send::advance(size_t bytes, bool frame_complete) {
  moved += bytes;
  if (frame_complete && moved == total) operation.endpoint.complete(*this);
}

Recv::Recv(Operation& op, Peer& p, MessageKey k, char* d, size_t bytes) : Transfer(op, &p, k, bytes), data(d) {
  op.endpoint.post(*this);
}

Recv::Recv(Operation& op, Peer& p, MessageKey k, char* d, size_t bytes, Reduction with, const char* own)
    : Transfer(op, &p, k, bytes), data(d), reduction(with), operand(own) {
  op.endpoint.post(*this);
}

Recv::Recv(Operation& op, Peer* p, uint32_t user_tag, char* d, size_t bytes)
    : Transfer(op, p, MessageKey{op.endpoint.epoch(), op.group.id, point_to_point_tag(user_tag, 0)}, bytes),
      data(d),
      posted(true) {
  op.endpoint.post(*this);
}

Recv::~Recv() {
  if (!done) operation.endpoint.withdraw(*this);
}

void Recv::take(const char* bytes, size_t count) {
  if (!reduction.apply) {
    std::memcpy(data + moved, bytes, count);
    advance(count);
    return;
  }
  size_t size = reduction.element_bytes, before = moved;
  if (carried_ > 0) {
    size_t n = std::min<size_t>(count, size - carried_);
    std::memcpy(carry_ + carried_, bytes, n);
    carried_ += static_cast<uint32_t>(n);
    bytes += n;
    count -= n;
    if (carried_ < size) return;
    reduction.apply(data + moved, carry_, operand + moved, 1);
    moved += size;
    carried_ = 0;
  }
  size_t whole = count / size;
  if (whole > 0) reduction.apply(data + moved, bytes, operand + moved, whole);
  moved += whole * size;
  carried_ = static_cast<uint32_t>(count - whole * size);
  std::memcpy(carry_, bytes + whole * size, carried_);
  size_t gained = moved - before;
  moved = before;
  advance(gained);
}

void Recv::advance(size_t bytes) {
  moved += bytes;
  if (!feeds) return;
  feeds->available = moved;
  if (feeds->peer->link && feeds->has_frame()) operation.endpoint.make_ready(*feeds->peer->link);
}

void Recv::confirm() {
  if (moved == total) operation.endpoint.complete(*this);
}

void Recv::feed(Send& next) {
  next.available = moved;
  if (!done) feeds = &next;
}

}  // namespace delta
