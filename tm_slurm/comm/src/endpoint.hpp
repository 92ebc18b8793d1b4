// One endpoint a process: a listener, the links to other processes, and the thread that moves their bytes.
// One mutex guards everything below; whoever holds it may start operations and move bytes. Operations are
// finished (futures, tensors, Python) only after it was released.
#pragma once
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>

#include "greeting.hpp"
#include "handshake.hpp"
#include "link.hpp"
#include "transfer.hpp"

namespace delta {

struct Launch {
  std::string name;
  std::chrono::milliseconds timeout{300000};
  bool collective = true;  // takes a sequence number
  std::function<Task(Operation&)> body;
  std::function<void(const Failure*, int source_rank)> finished;
};

struct Counters {
  uint64_t bytes_sent = 0, bytes_received = 0, bytes_dropped = 0;
  uint64_t frames_sent = 0, frames_received = 0, frames_dropped = 0, bad_frames = 0;
  uint64_t links_opened = 0, links_lost = 0, accepted = 0, dialled = 0, bad_handshakes = 0;
  uint64_t refused[kVerdicts] = {};
};

class Tape;

class Endpoint {
 public:
  Endpoint(std::string secret, const std::string& job, std::string host, uint64_t incarnation, double timeout_s,
           double keepalive_s);
  ~Endpoint();

  // Control: from any thread, without Python's lock.
  int port() const { return port_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  void configure(int rank, uint32_t epoch, uint64_t term, const std::map<int, Address>& peers,
                 const std::set<int>& absent = {});
  void prepare(uint32_t epoch, const std::map<int, Address>& changes, const std::set<int>& absent = {});
  void dial(uint32_t epoch, const std::vector<int>& ranks, double timeout_s);
  bool wait_staged(uint32_t epoch, const std::vector<int>& ranks, double timeout_s);
  void cancel(uint32_t epoch);
  void switch_to(uint32_t epoch);
  void interrupt(uint32_t epoch);
  void update(uint32_t epoch, const std::map<int, Address>& peers);
  std::vector<int> linked();
  std::map<std::string, int64_t> stats();
  void close();
  std::atomic<bool> sandbox{false};
  // Outside the first steps of a job and the sandbox there is none. One that was attached lives as long as the
  // endpoint: a collective may still have it in its hand.
  std::atomic<Tape*> tape{nullptr};
  void attach(std::shared_ptr<Tape> next);
  // In the sandbox: the ranks of one batch of joiners, this one's among them. Calls that concern nobody else are real;
  // the first of them that fails, or lasts longer than the limit, ends that.
  void share_sandbox(const std::set<int>& ranks, double limit_s);
  bool shares_sandbox(const std::vector<int>& ranks);
  std::chrono::milliseconds sharing_limit();
  void stop_sharing(const std::string& why);
  std::string why_alone();  // nothing, while no such call has failed

  // Groups and operations.
  void add_group(Group& group);
  void remove_group(Group& group);
  void abort_group(Group& group);
  std::vector<int> absent_of(Group& group);   // global ranks of the group that take no part in this epoch
  int stand_in(Group& group, int group_rank);  // that rank, or the lowest one present if it is absent
  uint64_t launch(Group& group, Launch launch);
  void defer(std::function<void()> callback);  // run it on the thread that may wait for Python

  // For transfers and links: with the mutex held.
  Counters counters;
  TimePoint now() const { return Clock::now(); }
  std::vector<char>& scratch() { return scratch_; }
  uint32_t epoch() const { return epoch_; }
  bool wants(uint32_t epoch) const { return epoch >= epoch_ && (epoch > epoch_ || !interrupted()); }
  void post(Send& send);
  void post(Recv& recv);
  void withdraw(Send& send);
  void withdraw(Recv& recv);
  void complete(Send& send);
  void complete(Recv& recv);
  void grant(Recv& recv);
  void granted(Link& link, const MessageKey& key);
  Recv* match(Link& link, const MessageKey& key, uint64_t total);
  bool failed_match() const { return failed_match_; }
  void make_ready(Link& link);
  void link_broken(Link& link, const std::string& why);
  void fail(Operation& operation, Failure failure);

 private:
  friend class Greeting;
  friend class Listener;
  struct Prepared {
    std::map<int, Address> changes;
    std::set<int> absent;
    std::map<int, Link*> links;
  };
  // Holds the mutex; on the way out runs what became runnable, then finishes operations without it.
  class Session {
   public:
    explicit Session(Endpoint& endpoint);
    ~Session();
    std::unique_lock<std::mutex> lock;

   private:
    Endpoint& endpoint_;
  };
  using Finished = std::vector<std::unique_ptr<Operation>>;

  bool interrupted() const { return static_cast<int64_t>(epoch_) <= interrupted_through_; }
  void check_open() const;
  void run();
  void completed(Transfer& transfer);
  void finish(Operation& operation);
  static void deliver(Finished& finished);
  void fail_all(const Failure& failure);
  void fail_peer(Peer& peer);
  void accept_unexpected(Link& link, std::list<Unexpected>::iterator message, Recv& recv);
  bool size_agrees(Recv& recv, uint64_t total, int rank);
  std::string describe(const Operation& operation) const;
  Peer& peer(int rank);
  void leave_out(Group& group) const;
  void leave_out(const std::set<int>& absent);

  // Connections.
  Identity identity(int target) const;
  void want_link(Peer& peer);
  void attempt(Peer& peer);
  void attempt_failed(Peer& peer, const std::string& problem, bool for_good);
  void stop_greeting(Greeting& greeting);
  Verdict decide(const Identity& remote, Prepared** staged_in);
  void adopt(Greeting& greeting, Peer& peer, uint64_t incarnation, Prepared* staged_in);
  void open_link(Peer& peer);
  void retire(Link& link);
  void accept_waiting();
  bool needed(const Peer& peer) const;

  // The thread.
  void loop();
  void tick(TimePoint now);
  int sleep_ms(TimePoint now) const;
  void kick();
  void drop_prepared(std::map<uint32_t, Prepared>::iterator it);
  void defer_loop();

  std::mutex mutex_;
  std::vector<std::shared_ptr<Tape>> tapes_;
  std::set<int> sharing_;
  std::chrono::milliseconds sharing_limit_{0};
  std::string why_alone_;
  std::atomic<int> contenders_{0};
  std::condition_variable changed_;  // a link was opened, staged or refused
  const std::string secret_;
  const Digest job_;
  const std::string host_;
  const uint64_t incarnation_;
  const std::chrono::milliseconds timeout_, keepalive_;
  int port_ = 0;
  int epoll_ = -1;
  std::unique_ptr<Source> listener_, waker_;
  bool configured_ = false, closing_ = false, accept_pending_ = false;
  int rank_ = -1;
  uint32_t epoch_ = 0;
  uint64_t term_ = 0;
  int64_t interrupted_through_ = -1;
  std::set<int> absent_;
  std::atomic<bool> some_absent_{false};  // so that nobody takes the mutex to hear that nobody is
  std::map<int, std::unique_ptr<Peer>> peers_;
  std::map<uint32_t, Prepared> prepared_;
  std::map<uint64_t, Group*> groups_;
  std::unordered_map<Link*, std::unique_ptr<Link>> links_;
  std::unordered_map<Greeting*, std::unique_ptr<Greeting>> greetings_;
  std::set<Peer*> dialling_;
  std::vector<std::unique_ptr<Source>> retired_;  // closed by the thread, not by whoever replaced them
  std::vector<Link*> ready_;
  std::deque<Operation*> runnable_;
  Operation* running_ = nullptr;
  bool failed_match_ = false;
  Finished finished_;
  std::vector<char> scratch_;
  std::string exhausted_;  // why no more descriptors can be had
  TimePoint next_tick_{}, next_keepalive_{}, wake_at_{};
  // Operations that have been launched and not finished; for how long there was at least one, and since when there is.
  size_t in_flight_ = 0;
  Clock::duration in_flight_total_{};
  TimePoint in_flight_since_{};
  std::thread thread_;
  int owner_pid_ = 0;

  std::mutex defer_mutex_;  // never taken together with mutex_
  std::condition_variable defer_changed_;
  std::deque<std::function<void()>> deferred_;
  bool defer_stop_ = false;
  std::thread defer_thread_;
};

}  // namespace delta
