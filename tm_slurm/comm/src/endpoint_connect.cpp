// How links come to be: listening, dialling, who is let in.
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "endpoint.hpp"

namespace delta {
namespace {

constexpr size_t kMaxGreetings = 256;
constexpr std::chrono::milliseconds kLongestBackoff{100};

void tune(int fd) {
  int one = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

std::string no_descriptors() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  return "no file descriptor left for a link (limit " + std::to_string(limit.rlim_cur) +
         "): raise it with `ulimit -n`; data parallel over N ranks needs about 2*log2(N) + 20";
}

bool resolve(const Address& address, sockaddr_storage& storage, socklen_t& length) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST;  // names are resolved in Python, where waiting is allowed
  addrinfo* found = nullptr;
  if (::getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found) != 0) return false;
  std::memcpy(&storage, found->ai_addr, found->ai_addrlen);
  length = found->ai_addrlen;
  ::freeaddrinfo(found);
  return true;
}

}  // namespace

Identity Endpoint::identity(int target) const {
  Identity mine;
  mine.job = job_;
  mine.rank = rank_;
  mine.target = target;
  mine.incarnation = incarnation_;
  mine.term = term_;
  mine.epoch = epoch_;
  return mine;
}

bool Endpoint::needed(const Peer& peer) const {
  if (peer.dial_wanted || !peer.sends.empty() || !peer.recvs.empty()) return true;
  for (auto& [id, group] : groups_)  // receives that wait for whatever message comes first
    for (const Recv* recv : group->posted) {
      if (recv->peer == &peer) return true;
      if (!recv->peer && std::find(group->members.begin(), group->members.end(), &peer) != group->members.end()) return true;
    }
  return false;
}

// On first use the higher rank dials, the lower one waits for it: so there is never more than one link.
void Endpoint::want_link(Peer& peer) {
  if (peer.link || peer.greeting || closing_ || !configured_) return;
  if (!peer.dial_wanted && (rank_ < peer.rank || peer.lost)) return;
  dialling_.insert(&peer);
  if (now() >= peer.next_attempt)
    attempt(peer);
  else
    next_tick_ = std::min(next_tick_, peer.next_attempt);
}

void Endpoint::attempt(Peer& peer) {
  if (!peer.known) return attempt_failed(peer, "its address is not known", false);
  sockaddr_storage storage{};
  socklen_t length = 0;
  if (!resolve(peer.address, storage, length)) return attempt_failed(peer, "not a numeric address", true);
  int fd = ::socket(storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) {
    if (errno == EMFILE || errno == ENFILE) return attempt_failed(peer, no_descriptors(), true);
    return attempt_failed(peer, std::strerror(errno), false);
  }
  tune(fd);
  int result = ::connect(fd, reinterpret_cast<sockaddr*>(&storage), length);
  if (result != 0 && errno != EINPROGRESS) {
    std::string problem = std::strerror(errno);
    ::close(fd);
    return attempt_failed(peer, problem, false);
  }
  auto greeting = std::make_unique<Greeting>(*this, fd, peer, identity(peer.rank), result == 0);
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  event.data.ptr = static_cast<Source*>(greeting.get());
  if (::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) return attempt_failed(peer, std::strerror(errno), false);
  peer.greeting = greeting.get();
  greetings_.emplace(greeting.get(), std::move(greeting));
}

void Endpoint::attempt_failed(Peer& peer, const std::string& problem, bool for_good) {
  peer.problem = problem;
  peer.next_attempt = now() + peer.backoff;
  peer.backoff = std::min(peer.backoff * 2, kLongestBackoff);
  if (for_good) {
    peer.refused = true;
    dialling_.erase(&peer);
    Failure failure;
    failure.fault = Fault::kPeerLost;
    failure.rank = peer.rank;
    failure.message = "no link to rank " + std::to_string(peer.rank) + " at " + peer.address.host + ":" +
                      std::to_string(peer.address.port) + ": " + problem;
    peer.lost = failure;
    fail_peer(peer);
  } else {
    next_tick_ = std::min(next_tick_, peer.next_attempt);
  }
  changed_.notify_all();
}

void Endpoint::stop_greeting(Greeting& greeting) {
  if (greeting.retired) return;
  greeting.retired = true;
  if (greeting.peer_ && greeting.peer_->greeting == &greeting) greeting.peer_->greeting = nullptr;
  ::epoll_ctl(epoll_, EPOLL_CTL_DEL, greeting.fd, nullptr);
  auto it = greetings_.find(&greeting);
  retired_.push_back(std::move(it->second));
  greetings_.erase(it);
}

Verdict Endpoint::decide(const Identity& remote, Prepared** staged_in) {
  if (closing_) return Verdict::kClosing;
  if (remote.job != job_) return Verdict::kWrongJob;
  if (!configured_) return Verdict::kEarly;
  if (remote.target != rank_) return Verdict::kWrongRank;
  for (auto& [epoch, prepared] : prepared_) {
    auto change = prepared.changes.find(remote.rank);
    if (change == prepared.changes.end() || change->second.incarnation != remote.incarnation) continue;
    if (remote.epoch != epoch) return Verdict::kEarly;
    *staged_in = &prepared;
    return Verdict::kAccepted;
  }
  auto it = peers_.find(remote.rank);
  if (it == peers_.end() || !it->second->known) {
    if (remote.rank == rank_) return remote.epoch < epoch_ ? Verdict::kStale : Verdict::kWrongRank;
    // Two joiners of one epoch: the other one has been told of it already, this one will be in a moment.
    if (remote.epoch > epoch_) return Verdict::kEarly;
    return Verdict::kUnknownRank;
  }
  Peer& known = *it->second;
  // Incarnations only tell processes apart. Who is newer shows in the epoch that it speaks of.
  if (remote.incarnation != known.address.incarnation)
    return remote.epoch > known.since ? Verdict::kEarly : Verdict::kStale;
  if (known.link) return Verdict::kDuplicate;
  if (known.greeting && rank_ > remote.rank) return Verdict::kDuplicate;  // ours will do
  return Verdict::kAccepted;
}

// The handshake is over: the connection becomes a link, staged for an epoch to come or in use at once.
void Endpoint::adopt(Greeting& greeting, Peer& peer, uint64_t incarnation, Prepared* staged_in) {
  auto link = std::make_unique<Link>(*this, greeting.fd, peer, incarnation);
  epoll_event event{};
  event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
  event.data.ptr = static_cast<Source*>(link.get());
  ::epoll_ctl(epoll_, EPOLL_CTL_MOD, greeting.fd, &event);
  greeting.fd = -1;
  greeting.retired = true;
  if (peer.greeting == &greeting) peer.greeting = nullptr;
  auto it = greetings_.find(&greeting);
  retired_.push_back(std::move(it->second));
  greetings_.erase(it);
  Link* opened = link.get();
  links_.emplace(opened, std::move(link));
  counters.links_opened++;
  if (staged_in) {
    opened->staged = true;
    auto before = staged_in->links.find(peer.rank);
    if (before != staged_in->links.end()) retire(*before->second);  // which takes it out of there
    staged_in->links[peer.rank] = opened;
  } else {
    if (peer.greeting) stop_greeting(*peer.greeting);
    peer.link = opened;
    open_link(peer);
  }
  make_ready(*opened);
  changed_.notify_all();
}

// Says on a new link what the other side has to know: which buffers are there.
void Endpoint::open_link(Peer& peer) {
  dialling_.erase(&peer);
  peer.backoff = std::chrono::milliseconds(5);
  peer.problem.clear();
  for (Recv* recv : peer.recvs) {
    if (!peer.link) return;  // what was said last found it broken
    if (recv->large() && !recv->granted) grant(*recv);
  }
}

void Endpoint::retire(Link& link) {
  if (link.retired) return;
  link.retired = true;
  link.detach();
  if (link.peer.link == &link) link.peer.link = nullptr;
  for (auto& [epoch, prepared] : prepared_) {
    auto it = prepared.links.find(link.peer.rank);
    if (it != prepared.links.end() && it->second == &link) prepared.links.erase(it);
  }
  // Closing is not enough: a process that was forked meanwhile has the connection, too.
  ::epoll_ctl(epoll_, EPOLL_CTL_DEL, link.fd, nullptr);
  auto it = links_.find(&link);
  retired_.push_back(std::move(it->second));
  links_.erase(it);
}

void Endpoint::accept_waiting() {
  accept_pending_ = false;
  for (;;) {
    int fd = ::accept4(listener_->fd, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EMFILE || errno == ENFILE) {
        accept_pending_ = true;  // tried again at the next tick
        exhausted_ = no_descriptors();
        Failure failure;
        failure.message = exhausted_;
        for (auto& [rank, waiting] : peers_)
          if (!waiting->link && needed(*waiting)) {
            for (Send* send : waiting->sends) fail(send->operation, failure);
            for (Recv* recv : waiting->recvs) fail(recv->operation, failure);
            for (auto& [id, group] : groups_)
              for (Recv* recv : group->posted)
                if (recv->peer == waiting.get()) fail(recv->operation, failure);
          }
      }
      return;
    }
    if (greetings_.size() >= kMaxGreetings) {  // a flood of strangers: those who are slowest to prove themselves go
      Greeting* oldest = nullptr;
      for (auto& [key, greeting] : greetings_)
        if (!greeting->peer_ && (!oldest || greeting->deadline < oldest->deadline)) oldest = key;
      if (oldest) stop_greeting(*oldest);
    }
    tune(fd);
    auto greeting = std::make_unique<Greeting>(*this, fd);
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP | EPOLLET;
    event.data.ptr = static_cast<Source*>(greeting.get());
    if (::epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) continue;
    greetings_.emplace(greeting.get(), std::move(greeting));
  }
}

}  // namespace delta
