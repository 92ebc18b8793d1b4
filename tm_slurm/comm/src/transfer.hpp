// What the transport moves: operations (one collective each), their sends and receives, groups and peers.
// All of it is guarded by the endpoint's mutex.
#pragma once
#include <chrono>
#include <coroutine>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "failure.hpp"
#include "frame.hpp"
#include "task.hpp"

namespace delta {

class Endpoint;
class Greeting;
class Link;
class Operation;
class Recv;
class Send;
class Transfer;
struct Group;
struct Peer;

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;

// out[i] = a[i] op b[i] for `count` elements; the pointers need no alignment, out may be a or b.
using Reducer = void (*)(char* out, const char* a, const char* b, size_t count);
struct Reduction {
  Reducer apply = nullptr;
  uint32_t element_bytes = 1;
  bool rounds = false;  // in what order three values are reduced shows in the result
};

// One collective or point-to-point call in flight.
class Operation {
 public:
  Operation(Endpoint& e, Group& g, std::string n) : endpoint(e), group(g), name(std::move(n)) {}
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  Endpoint& endpoint;
  Group& group;
  std::string name;
  uint64_t sequence = 0;
  TimePoint started{};
  TimePoint deadline{};
  std::function<void(const Failure*, int source_rank)> finished;  // called once, without the mutex
  int source_rank = -1;                          // receive from any: who it was

  Task task;
  std::coroutine_handle<> waiting;  // where to go on
  Transfer* awaited = nullptr;      // when this is done
  bool queued = false;
  std::optional<Failure> failure;
  std::list<std::unique_ptr<Operation>>::iterator place;
};

class Transfer {
 public:
  Transfer(Operation& op, Peer* p, MessageKey k, size_t n) : operation(op), peer(p), key(k), total(n) {}
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  Operation& operation;
  Peer* peer;
  MessageKey key;
  size_t total;
  size_t moved = 0;
  bool done = false;
  Link* busy = nullptr;  // the link that has a frame of this message half moved

  struct Awaiter {
    Transfer* transfer;
    bool await_ready() const noexcept { return transfer->done; }
    void await_suspend(std::coroutine_handle<> handle) noexcept {
      transfer->operation.waiting = handle;
      transfer->operation.awaited = transfer;
    }
    void await_resume() const noexcept {}
  };
  Awaiter operator co_await() noexcept { return {this}; }

 protected:
  ~Transfer() = default;
};

class Send final : public Transfer {
 public:
  // `ready` bytes of `data` may be sent now; a receive that feeds this send raises it.
  Send(Operation& op, Peer& peer, MessageKey key, const char* data, size_t bytes, size_t ready);
  Send(Operation& op, Peer& peer, MessageKey key, const char* data, size_t bytes);
  ~Send();

  bool large() const { return total > kEagerBytes; }
  bool has_frame() const;  // may a frame be made now?
  void advance(size_t bytes, bool frame_complete);

  const char* data;
  size_t available;
  bool granted;
  bool offered;
};

class Recv final : public Transfer {
 public:
  Recv(Operation& op, Peer& peer, MessageKey key, char* data, size_t bytes);
  // Reducing: data[i] = received[i] op operand[i].
  Recv(Operation& op, Peer& peer, MessageKey key, char* data, size_t bytes, Reduction with, const char* operand);
  // Point-to-point: from `peer`, or from any member if null; the key's tag is the user's until it is matched.
  Recv(Operation& op, Peer* peer, uint32_t user_tag, char* data, size_t bytes);
  ~Recv();

  bool large() const { return total > kEagerBytes; }
  char* direct() { return reduction.apply ? nullptr : data + moved; }  // where bytes may be read to at once
  void take(const char* bytes, size_t count);                          // bytes read elsewhere
  void advance(size_t bytes);                                          // bytes read to direct()
  void confirm();                                                      // a frame ended and is good
  void feed(Send& next);

  char* data;
  Reduction reduction;
  const char* operand = nullptr;
  Send* feeds = nullptr;
  bool posted = false;  // waiting in its group for a point-to-point message
  bool granted = false;

 private:
  char carry_[16];  // an element that was cut by the end of a read
  uint32_t carried_ = 0;
};

// A message that came before anybody asked for it: a small one, or the offer of a large one.
struct Unexpected {
  MessageKey key;
  uint64_t total = 0;
  bool offer = false;
  std::vector<char> data;
  size_t got = 0;
  bool complete = false;
};

struct Address {
  std::string host;
  uint16_t port = 0;
  uint64_t incarnation = 0;
  bool operator==(const Address&) const = default;
};

// The other end as a rank, whoever sits there now.
struct Peer {
  explicit Peer(int r) : rank(r) {}
  int rank;
  bool known = false;
  Address address;
  uint32_t since = 0;  // the epoch at which this address came to hold
  Link* link = nullptr;
  std::optional<Failure> lost;  // the link broke in this epoch
  std::list<Send*> sends;       // in the order they were posted
  std::list<Recv*> recvs;
  std::list<Unexpected> leftover;  // what had arrived when the link broke

  Greeting* greeting = nullptr;  // a connection of ours that is being made
  bool dial_wanted = false;      // by dial(), whatever the ranks
  TimePoint next_attempt{};
  std::chrono::milliseconds backoff{5};
  std::string problem;       // why the last attempt failed
  bool refused = false;      // for good

  void found_again() {
    lost.reset();
    std::erase_if(leftover, [](const Unexpected& message) { return message.offer; });  // it will be made anew
  }
};

struct Group {
  uint64_t id = 0;
  int rank = 0;
  std::vector<int> ranks;
  std::vector<Peer*> members;  // by group rank; null for this process
  std::vector<int> present;    // group ranks that take part in this epoch, in order: all, unless some are absent
  int place = 0;               // of this process among them
  uint64_t sequence = 0;
  std::list<std::unique_ptr<Operation>> active;
  std::list<Recv*> posted;  // unmatched point-to-point receives, in order
  std::string name;

  int size() const { return static_cast<int>(ranks.size()); }
  int count() const { return static_cast<int>(present.size()); }
  // Where a rank is among those present; the lowest of them stands in for one that is not.
  int place_of(int group_rank) const {
    for (int k = 0; k < count(); k++)
      if (present[static_cast<size_t>(k)] == group_rank) return k;
    return 0;
  }
};

}  // namespace delta
