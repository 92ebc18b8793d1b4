// Life of an endpoint and its thread.
#include "endpoint.hpp"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace delta {

class Listener final : public Source {
 public:
  Listener(Endpoint& endpoint, int fd) : Source(fd), endpoint_(endpoint) {}
  void on_events(uint32_t) override { endpoint_.accept_waiting(); }

 private:
  Endpoint& endpoint_;
};

namespace {

class Waker final : public Source {
 public:
  explicit Waker(int fd) : Source(fd) {}
  void on_events(uint32_t) override {
    uint64_t count = 0;
    (void)!::read(fd, &count, sizeof count);
  }
};

// For the other side, too, although a process that was forked from this one has the connection as well.
void end(const Source& source) {
  if (source.fd >= 0) ::shutdown(source.fd, SHUT_RDWR);
}

[[noreturn]] void no(const std::string& what) {
  throw TransportError({Fault::kFailed, what + ": " + std::strerror(errno), -1});
}

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

int listen_at(const std::string& host, int& port) {
  sockaddr_storage storage{};
  auto* v4 = reinterpret_cast<sockaddr_in*>(&storage);
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&storage);
  socklen_t length = sizeof(sockaddr_in);
  if (::inet_pton(AF_INET, host.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
  } else if (::inet_pton(AF_INET6, host.c_str(), &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    length = sizeof(sockaddr_in6);
  } else {
    errno = EINVAL;
    no("cannot listen: '" + host + "' is not a numeric address");
  }
  int fd = ::socket(storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) no("cannot make a socket");
  if (::bind(fd, reinterpret_cast<sockaddr*>(&storage), length) != 0 || ::listen(fd, 1024) != 0) {
    int error = errno;
    ::close(fd);
    errno = error;
    no("cannot listen at " + host);
  }
  length = sizeof storage;
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &length);
  port = ntohs(storage.ss_family == AF_INET ? v4->sin_port : v6->sin6_port);
  return fd;
}

}  // namespace

Endpoint::Endpoint(std::string secret, const std::string& job, std::string host, uint64_t incarnation, double timeout_s,
                   double keepalive_s)
    : secret_(std::move(secret)),
      job_(sha256(job)),
      host_(std::move(host)),
      incarnation_(incarnation),
      timeout_(milliseconds(timeout_s)),
      keepalive_(milliseconds(keepalive_s)),
      scratch_(256u << 10),
      owner_pid_(::getpid()) {
  // Everything that can fail comes before the threads are started: a thread must not outlive its constructor.
  listener_ = std::make_unique<Listener>(*this, listen_at(host_, port_));
  int waker = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (waker < 0) no("cannot make an eventfd");
  waker_ = std::make_unique<Waker>(waker);
  epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
  if (epoll_ < 0) no("cannot make an epoll descriptor");
  for (Source* source : {listener_.get(), waker_.get()}) {
    epoll_event event{};
    event.events = EPOLLIN | EPOLLET;
    event.data.ptr = source;
    if (::epoll_ctl(epoll_, EPOLL_CTL_ADD, source->fd, &event) != 0) {
      ::close(epoll_);
      no("cannot watch a descriptor");
    }
  }
  next_tick_ = next_keepalive_ = now();
  thread_ = std::thread([this] { loop(); });
}

Endpoint::~Endpoint() { close(); }

void Endpoint::close() {
  if (owner_pid_ != ::getpid()) {  // a forked child has the object but not its threads
    if (thread_.joinable()) thread_.detach();
    if (defer_thread_.joinable()) defer_thread_.detach();
    return;
  }
  {
    Session session(*this);
    if (closing_) return;
    closing_ = true;
    fail_all({Fault::kFailed, "the endpoint was closed", -1});
    run();
    kick();
    changed_.notify_all();
  }
  thread_.join();
  {
    std::lock_guard<std::mutex> lock(defer_mutex_);
    defer_stop_ = true;
    defer_changed_.notify_all();
  }
  if (defer_thread_.joinable()) defer_thread_.join();
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [id, peer] : peers_) {
    peer->link = nullptr;
    peer->greeting = nullptr;
  }
  prepared_.clear();
  for (auto& [key, link] : links_) {
    link->detach();
    end(*link);
  }
  for (auto& source : retired_) end(*source);
  links_.clear();
  greetings_.clear();
  retired_.clear();
  listener_.reset();
  waker_.reset();
  ::close(epoll_);
  epoll_ = -1;
}

Endpoint::Session::Session(Endpoint& endpoint) : lock(endpoint.mutex_, std::defer_lock), endpoint_(endpoint) {
  endpoint.contenders_.fetch_add(1, std::memory_order_relaxed);
  lock.lock();
  endpoint.contenders_.fetch_sub(1, std::memory_order_relaxed);
}

Endpoint::Session::~Session() {
  endpoint_.run();
  if (!endpoint_.ready_.empty() || endpoint_.next_tick_ < endpoint_.wake_at_) endpoint_.kick();
  Finished finished = std::move(endpoint_.finished_);
  endpoint_.finished_.clear();
  lock.unlock();
  deliver(finished);
}

void Endpoint::kick() {
  if (wake_at_ == TimePoint{} || !waker_) return;  // it is awake, or gone
  wake_at_ = TimePoint{};
  uint64_t one = 1;
  (void)!::write(waker_->fd, &one, sizeof one);
}

void Endpoint::make_ready(Link& link) {
  if (link.queued || link.retired) return;
  link.queued = true;
  ready_.push_back(&link);
}

int Endpoint::sleep_ms(TimePoint at) const {
  if (!ready_.empty()) return 0;
  auto left = std::chrono::ceil<std::chrono::milliseconds>(next_tick_ - at).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1000));
}

void Endpoint::loop() {
  ::prctl(PR_SET_NAME, "tm-links");
  constexpr size_t kBudget = 512u << 10;
  epoll_event events[64];
  std::vector<std::unique_ptr<Source>> closing;
  Finished finished;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!closing_) {
    int wait = sleep_ms(now());
    wake_at_ = wait > 0 ? now() + std::chrono::milliseconds(wait) : TimePoint{};
    lock.unlock();
    deliver(finished);
    for (auto& source : closing) end(*source);  // can take milliseconds
    closing.clear();
    int count = ::epoll_wait(epoll_, events, 64, wait);
    while (contenders_.load(std::memory_order_relaxed) > 0) std::this_thread::yield();
    lock.lock();
    wake_at_ = TimePoint{};
    for (int i = 0; i < count; i++) {
      auto* source = static_cast<Source*>(events[i].data.ptr);
      if (!source->retired) source->on_events(events[i].events);
    }
    std::vector<Link*> ready = std::move(ready_);
    ready_.clear();
    for (Link* link : ready) link->queued = false;
    bool hurry = false;  // somebody else wants the mutex: the rest can wait
    for (Link* link : ready) {
      if (link->retired) continue;
      if (hurry || link->pump(kBudget)) make_ready(*link);
      run();
      hurry = contenders_.load(std::memory_order_relaxed) > 0;
    }
    if (now() >= next_tick_) tick(now());
    run();
    closing.swap(retired_);  // nothing refers to them: events of this round are handled
    std::erase_if(ready_, [](Link* link) { return link->retired; });
    finished.swap(finished_);
  }
  lock.unlock();
  deliver(finished);
}

void Endpoint::tick(TimePoint at) {
  TimePoint next = at + std::chrono::seconds(1);
  for (auto& [id, group] : groups_)
    for (auto& operation : group->active) {
      if (operation->deadline > at) {
        next = std::min(next, operation->deadline);
        continue;
      }
      fail(*operation, {Fault::kTimeout,
                        operation->name + " in group " + group->name + " timed out on rank " + std::to_string(rank_) +
                            " at " + host_ + " at epoch " + std::to_string(epoch_) + ": " + describe(*operation),
                        -1});
    }
  std::vector<Greeting*> late;
  for (auto& [key, greeting] : greetings_) {
    if (greeting->deadline <= at)
      late.push_back(key);
    else
      next = std::min(next, greeting->deadline);
  }
  for (Greeting* greeting : late) greeting->failed("no answer to the handshake", false);
  if (accept_pending_) accept_waiting();
  if (accept_pending_) next = std::min(next, at + std::chrono::milliseconds(100));
  for (auto it = dialling_.begin(); it != dialling_.end();) {
    Peer& peer = **it++;
    if (peer.link || !needed(peer)) {
      dialling_.erase(&peer);
    } else if (!peer.greeting) {
      if (peer.next_attempt <= at) attempt(peer);
      if (!peer.refused) next = std::min(next, std::max(peer.next_attempt, at));
    }
  }
  if (keepalive_.count() > 0) {
    auto period = keepalive_ / 4;
    if (at >= next_keepalive_) {
      bool slept = at > next_keepalive_ + period;  // this process itself was stopped or starved
      std::vector<Link*> silent;
      for (auto& [key, link] : links_) {
        if (slept) link->heard = at;
        if (at - link->heard > keepalive_) silent.push_back(key);
        if (at - link->spoke >= period) {
          link->control(FrameKind::kPing, MessageKey{epoch_, 0, 0}, 0);
          make_ready(*link);
        }
      }
      for (Link* link : silent)
        link_broken(*link, "silent for more than " + std::to_string(keepalive_.count()) + " ms");
      next_keepalive_ = at + period;
    }
    next = std::min(next, next_keepalive_);
  }
  next_tick_ = next;
}

void Endpoint::link_broken(Link& link, const std::string& why) {
  if (link.retired) return;
  Peer& peer = link.peer;
  bool current = peer.link == &link;
  counters.links_lost++;
  if (current) {
    link.abandon_in();
    std::erase_if(link.unexpected, [](const Unexpected& message) { return !message.complete && !message.offer; });
    link.in_unexpected_ = nullptr;
    peer.leftover.splice(peer.leftover.end(), link.unexpected);
  }
  retire(link);
  if (current) {
    peer.lost = Failure{Fault::kPeerLost,
                        "lost the link to rank " + std::to_string(peer.rank) + " (incarnation " +
                            std::to_string(link.incarnation) + " at " + peer.address.host + "): " + why,
                        peer.rank};
    fail_peer(peer);
  }
  changed_.notify_all();
}

void Endpoint::defer(std::function<void()> callback) {
  std::unique_lock<std::mutex> lock(defer_mutex_);
  if (defer_stop_) {  // closed: nobody else will do it
    lock.unlock();
    return callback();
  }
  if (!defer_thread_.joinable()) defer_thread_ = std::thread([this] { defer_loop(); });
  deferred_.push_back(std::move(callback));
  defer_changed_.notify_one();
}

void Endpoint::defer_loop() {
  ::prctl(PR_SET_NAME, "tm-futures");
  std::unique_lock<std::mutex> lock(defer_mutex_);
  for (;;) {
    defer_changed_.wait(lock, [this] { return defer_stop_ || !deferred_.empty(); });
    if (deferred_.empty()) return;
    auto callback = std::move(deferred_.front());
    deferred_.pop_front();
    lock.unlock();
    callback();
    callback = nullptr;
    lock.lock();
  }
}

}  // namespace delta
