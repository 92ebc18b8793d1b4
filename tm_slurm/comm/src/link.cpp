#include "link.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "endpoint.hpp"

namespace delta {
namespace {
const char kZeros[64u << 10] = {};
}

Source::~Source() {
  if (fd >= 0) ::close(fd);
}

Link::Link(Endpoint& endpoint, int fd, Peer& peer, uint64_t incarnation)
    : Source(fd), peer(peer), incarnation(incarnation), endpoint_(endpoint) {
  heard = spoke = Clock::now();
}

void Link::on_events(uint32_t events) {
  if (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) readable_ = true;
  if (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) hung_up_ = true;
  if (events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) writable_ = true;
  endpoint_.make_ready(*this);
}

bool Link::pump(size_t budget) {
  if (!retired && readable_ && !congested()) read(budget);
  if (!retired && writable_) write(budget);
  if (retired) return false;
  bool more_out = writable_ && (out_frame_ || control_sent_ < control_.size() || choose() != nullptr);
  return (readable_ && !congested()) || more_out;
}

void Link::broken(const std::string& why) { endpoint_.link_broken(*this, why); }

void Link::control(FrameKind kind, const MessageKey& key, uint64_t total) {
  FrameHeader header;
  header.kind = kind;
  header.epoch = key.epoch;
  header.group = key.group;
  header.tag = key.tag;
  header.total = total;
  if (control_sent_ == control_.size()) {
    control_.clear();
    control_sent_ = 0;
  }
  control_.append(reinterpret_cast<const char*>(&header), sizeof header);
}

// The oldest send that has something to say, but not twice running from one operation if another has, too.
// Point-to-point messages are announced in the order in which they were sent: that is how they are matched.
Send* Link::choose() {
  if (staged) return nullptr;
  Send* first = nullptr;
  bool announces = false;
  for (Send* send : peer.sends) {
    if (!send->has_frame()) continue;
    if (is_point_to_point(send->key.tag) && !send->offered) {
      if (announces) continue;
      announces = true;
    }
    if (&send->operation != last_) return send;
    if (!first) first = send;
  }
  return first;
}

void Link::write(size_t budget) {
  size_t sent = 0;
  while (!retired && writable_ && sent < budget) {
    iovec parts[3];
    int count = 0;
    if (!out_frame_) {
      if (control_sent_ < control_.size()) {
        ssize_t n = ::send(fd, control_.data() + control_sent_, control_.size() - control_sent_, MSG_NOSIGNAL);
        if (n < 0) {
          if (errno == EINTR) continue;
          if (errno != EAGAIN) return broken(std::strerror(errno));
          writable_ = false;
          return;
        }
        control_sent_ += static_cast<size_t>(n);
        sent += static_cast<size_t>(n);
        spoke = endpoint_.now();
        continue;
      }
      Send* send = choose();
      if (!send) return;
      last_ = &send->operation;
      out_ = FrameHeader{};
      out_.epoch = send->key.epoch;
      out_.group = send->key.group;
      out_.tag = send->key.tag;
      out_.total = send->total;
      if (is_point_to_point(out_.tag) && !send->offered) {
        out_.tag = send->key.tag = point_to_point_tag(user_tag_of(out_.tag), message_counter++);
        send->offered = true;
        if (send->large()) out_.kind = FrameKind::kOffer;
      }
      if (out_.kind == FrameKind::kData) {
        out_.length = static_cast<uint32_t>(std::min<size_t>(kMaxFrameBytes, send->available - send->moved));
        out_send = send;
        send->busy = this;
      }
      out_header_ = 0;
      out_left_ = out_.length;
      out_trailer_ = out_.length > 0 ? 1 : 0;
      out_frame_ = true;
    }
    if (out_header_ < sizeof out_)
      parts[count++] = {reinterpret_cast<char*>(&out_) + out_header_, sizeof out_ - out_header_};
    if (out_left_ > 0) {
      if (out_send)
        parts[count++] = {const_cast<char*>(out_send->data + out_send->moved), out_left_};
      else
        parts[count++] = {const_cast<char*>(kZeros), std::min(out_left_, sizeof kZeros)};
    }
    if (out_trailer_ > 0 && (out_send || out_left_ <= sizeof kZeros))
      parts[count++] = {const_cast<char*>(out_send ? &kGood : &kVoid), 1};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = static_cast<size_t>(count);
    ssize_t n = ::sendmsg(fd, &message, MSG_NOSIGNAL);
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno != EAGAIN) return broken(std::strerror(errno));
      writable_ = false;
      return;
    }
    spoke = endpoint_.now();
    size_t moved = static_cast<size_t>(n);
    sent += moved;
    endpoint_.counters.bytes_sent += moved;
    size_t head = std::min(moved, sizeof out_ - out_header_);
    out_header_ += head;
    moved -= head;
    size_t payload = std::min(moved, out_left_);
    out_left_ -= payload;
    out_trailer_ -= moved - payload;
    bool complete = out_header_ == sizeof out_ && out_left_ == 0 && out_trailer_ == 0;
    if (complete) {
      out_frame_ = false;
      endpoint_.counters.frames_sent++;
    }
    if (Send* send = out_send) {
      if (complete) {
        out_send = nullptr;
        send->busy = nullptr;
      }
      send->advance(payload, complete);
    }
  }
}

void Link::read(size_t budget) {
  std::vector<char>& scratch = endpoint_.scratch();
  size_t got = 0;
  while (!retired && readable_ && got < budget && !congested()) {
    iovec parts[2];
    int count = 0;
    size_t direct = 0;
    if (in_left_ > 0) {
      if (in_recv_ && in_recv_->direct()) {
        parts[count++] = {in_recv_->direct(), in_left_};
        direct = in_left_;
      } else if (in_unexpected_) {
        parts[count++] = {in_unexpected_->data.data() + in_unexpected_->got, in_left_};
        direct = in_left_;
      }
    }
    parts[count++] = {scratch.data(), scratch.size()};
    size_t room = direct + scratch.size();
    ssize_t n = ::readv(fd, parts, count);
    if (n == 0) return broken("closed by the other side");
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN) {
        readable_ = false;
        return;
      }
      return broken(std::strerror(errno));
    }
    heard = endpoint_.now();
    size_t bytes = static_cast<size_t>(n);
    if (bytes < room && !hung_up_) readable_ = false;  // a short read: nothing is left (edge-triggered)
    got += bytes;
    endpoint_.counters.bytes_received += bytes;
    size_t placed = std::min(bytes, direct);
    if (placed > 0) {
      in_left_ -= placed;
      if (in_unexpected_) in_unexpected_->got += placed;
      if (in_recv_) in_recv_->advance(placed);
    }
    if (bytes > placed && !consume(scratch.data(), bytes - placed)) return;
  }
}

bool Link::consume(const char* bytes, size_t count) {
  while (count > 0 && !retired) {
    if (in_header_ < sizeof in_) {
      size_t n = std::min(count, sizeof in_ - in_header_);
      std::memcpy(reinterpret_cast<char*>(&in_) + in_header_, bytes, n);
      in_header_ += n;
      bytes += n;
      count -= n;
      if (in_header_ == sizeof in_ && !header_complete()) return false;
      continue;
    }
    if (in_left_ == 0) {  // the trailer
      end_of_frame(*bytes == kGood);
      bytes++;
      count--;
      continue;
    }
    size_t n = std::min(count, in_left_);
    if (in_unexpected_) {
      std::memcpy(in_unexpected_->data.data() + in_unexpected_->got, bytes, n);
      in_unexpected_->got += n;
    } else if (in_recv_) {
      in_recv_->take(bytes, n);
    } else {
      endpoint_.counters.bytes_dropped += n;
    }
    in_left_ -= n;
    bytes += n;
    count -= n;
  }
  return !retired;
}

void Link::end_of_frame(bool good) {
  Recv* recv = in_recv_;
  Unexpected* message = in_unexpected_;
  in_recv_ = nullptr;
  in_unexpected_ = nullptr;
  in_header_ = 0;
  if (recv) {
    recv->busy = nullptr;
    if (good) recv->confirm();
    return;
  }
  if (!message) return;
  message->complete = good;
  if (good) return;
  unexpected_bytes_ -= message->data.size();
  unexpected.remove_if([&](const Unexpected& other) { return &other == message; });
}

void Link::abandon_in() {
  if (in_recv_) in_recv_->busy = nullptr;
  in_recv_ = nullptr;
}

bool Link::header_complete() {
  if (const char* problem = header_problem(in_)) {
    endpoint_.counters.bad_frames++;
    broken(std::string("broke the protocol: ") + problem);
    return false;
  }
  endpoint_.counters.frames_received++;
  in_left_ = in_.length;
  in_recv_ = nullptr;
  in_unexpected_ = nullptr;
  if (in_.kind != FrameKind::kPing && endpoint_.wants(in_.epoch)) {
    switch (in_.kind) {
      case FrameKind::kData: data_header(); break;
      case FrameKind::kOffer: offer_header(); break;
      case FrameKind::kGrant: endpoint_.granted(*this, in_.key()); break;
      case FrameKind::kPing: break;
    }
  } else if (in_.kind == FrameKind::kData) {
    endpoint_.counters.frames_dropped++;
  }
  if (in_left_ == 0 && !retired) end_of_frame(true);  // no payload, no trailer
  return !retired;
}

void Link::data_header() {
  Recv* recv = endpoint_.match(*this, in_.key(), in_.total);
  if (recv) {
    if (recv->moved + in_.length > recv->total) return broken("broke the protocol: more bytes than the message has");
    in_recv_ = recv;
    recv->busy = this;
    return;
  }
  if (in_.total > kEagerBytes || endpoint_.failed_match()) {  // of an operation that was given up here
    endpoint_.counters.frames_dropped++;
    return;
  }
  Unexpected& message = unexpected.emplace_back();
  message.key = in_.key();
  message.total = in_.total;
  message.data.resize(in_.length);  // at most kEagerBytes: checked by header_problem
  unexpected_bytes_ += in_.length;
  in_unexpected_ = &message;
}

void Link::offer_header() {
  if (Recv* recv = endpoint_.match(*this, in_.key(), in_.total)) {
    endpoint_.grant(*recv);
    return;
  }
  if (endpoint_.failed_match()) return;
  Unexpected& message = unexpected.emplace_back();
  message.key = in_.key();
  message.total = in_.total;
  message.offer = true;
}

void Link::purge(uint32_t before_epoch) {
  for (auto it = unexpected.begin(); it != unexpected.end();) {
    if (it->key.epoch >= before_epoch) {
      ++it;
      continue;
    }
    if (in_unexpected_ == &*it) in_unexpected_ = nullptr;
    unexpected_bytes_ -= it->data.size();
    it = unexpected.erase(it);
  }
  std::erase_if(grants, [&](const MessageKey& key) { return key.epoch < before_epoch; });
}

void Link::detach() {
  abandon_in();
  if (out_send) out_send->busy = nullptr;
  out_send = nullptr;
}

}  // namespace delta
