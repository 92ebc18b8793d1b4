#include "greeting.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "endpoint.hpp"

namespace delta {
namespace {
constexpr std::chrono::seconds kGreetingTime{5};
}

Greeting::Greeting(Endpoint& endpoint, int fd)
    : Source(fd),
      deadline(Clock::now() + kGreetingTime),
      endpoint_(endpoint),
      peer_(nullptr),
      handshake_(Handshake::acceptor(endpoint.secret_)),
      connecting_(false) {}

Greeting::Greeting(Endpoint& endpoint, int fd, Peer& peer, const Identity& mine, bool connected)
    : Source(fd),
      deadline(Clock::now() + kGreetingTime),
      endpoint_(endpoint),
      peer_(&peer),
      wanted_incarnation_(peer.address.incarnation),
      handshake_(Handshake::dialler(endpoint.secret_, mine)),
      connecting_(!connected) {
  out_ = handshake_.opening();
}

void Greeting::failed(const std::string& problem, bool for_good) {
  Endpoint& endpoint = endpoint_;
  Peer* peer = peer_;
  endpoint.stop_greeting(*this);
  if (peer) endpoint.attempt_failed(*peer, problem, for_good);
}

bool Greeting::flush() {
  while (!out_.empty()) {
    ssize_t n = ::send(fd, out_.data(), out_.size(), MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      if (errno == EAGAIN) return true;
      failed(std::strerror(errno), false);
      return false;
    }
    out_.erase(0, static_cast<size_t>(n));
  }
  return true;
}

void Greeting::on_events(uint32_t events) {
  if (connecting_) {
    if (!(events & (EPOLLOUT | EPOLLERR | EPOLLHUP))) return;
    int error = 0;
    socklen_t size = sizeof error;
    ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) return failed(std::strerror(error), false);
    connecting_ = false;
  }
  if (flush()) advance();
}

void Greeting::advance() {
  while (handshake_.state() == Handshake::State::kTalking) {
    ssize_t n = ::recv(fd, in_ + got_, handshake_.wanted() - got_, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) {
      if (!peer_) endpoint_.counters.bad_handshakes++;
      const char* why = n < 0 ? std::strerror(errno) : "closed during the handshake (do both sides have the job's secret?)";
      return failed(why, false);
    }
    got_ += static_cast<size_t>(n);
    if (got_ < handshake_.wanted()) continue;
    got_ = 0;
    out_ += handshake_.feed(in_);
    if (handshake_.state() == Handshake::State::kFailed) {
      endpoint_.counters.bad_handshakes++;
      return failed(handshake_.problem(), false);
    }
    if (!out_.empty() && !flush()) return;
  }
  decided();
}

void Greeting::decided() {
  Endpoint& endpoint = endpoint_;
  const Identity remote = handshake_.remote();
  if (!peer_) {
    Endpoint::Prepared* staged_in = nullptr;
    Verdict verdict = endpoint.decide(remote, &staged_in);
    out_ = handshake_.answer(verdict, endpoint.identity(remote.rank));
    if (verdict != Verdict::kAccepted) {
      endpoint.counters.refused[static_cast<uint32_t>(verdict)]++;
      if (flush()) endpoint.stop_greeting(*this);
      return;
    }
    if (!flush()) return;
    endpoint.counters.accepted++;
    return endpoint.adopt(*this, endpoint.peer(remote.rank), remote.incarnation, staged_in);
  }
  switch (handshake_.verdict()) {
    case Verdict::kAccepted: break;
    case Verdict::kStale:
    case Verdict::kWrongJob:
    case Verdict::kUnknownRank: return failed(std::string("refused: ") + verdict_text(handshake_.verdict()), true);
    default: return failed(std::string("refused: ") + verdict_text(handshake_.verdict()), false);
  }
  if (remote.rank != peer_->rank || remote.incarnation != wanted_incarnation_)
    return failed("rank " + std::to_string(remote.rank) + " incarnation " + std::to_string(remote.incarnation) +
                      " answers there, expected incarnation " + std::to_string(wanted_incarnation_),
                  false);
  if (peer_->address.incarnation != wanted_incarnation_) return failed("the address changed meanwhile", false);
  endpoint.counters.dialled++;
  endpoint.adopt(*this, *peer_, remote.incarnation, nullptr);
}

}  // namespace delta
