// What the runtime asks of an endpoint: who is who, and the two phases of a replacement.
#include <algorithm>

#include "endpoint.hpp"

namespace delta {

Peer& Endpoint::peer(int rank) {
  auto& slot = peers_[rank];
  if (!slot) slot = std::make_unique<Peer>(rank);
  return *slot;
}

void Endpoint::check_open() const {
  if (closing_) throw TransportError({Fault::kFailed, "the endpoint is closed", -1});
}

void Endpoint::add_group(Group& group) {
  Session session(*this);
  group.members.assign(group.ranks.size(), nullptr);
  for (size_t i = 0; i < group.ranks.size(); i++)
    if (static_cast<int>(i) != group.rank) group.members[i] = &peer(group.ranks[i]);
  groups_[group.id] = &group;
  leave_out(group);
}

void Endpoint::leave_out(Group& group) const {
  group.present.clear();
  for (int i = 0; i < group.size(); i++)
    if (i == group.rank || !absent_.contains(group.ranks[static_cast<size_t>(i)])) group.present.push_back(i);
  group.place = group.place_of(group.rank);
}

void Endpoint::leave_out(const std::set<int>& absent) {
  absent_ = absent;
  some_absent_ = !absent.empty();
  for (auto& [id, group] : groups_) leave_out(*group);
  for (int rank : absent) {
    Peer& gone = peer(rank);
    if (rank == rank_) continue;
    gone.known = false;
    if (gone.link) retire(*gone.link);
    if (gone.greeting) stop_greeting(*gone.greeting);
  }
}

std::vector<int> Endpoint::absent_of(Group& group) {
  std::vector<int> found;
  if (!some_absent_.load(std::memory_order_relaxed)) return found;
  Session session(*this);
  for (int rank : group.ranks)
    if (absent_.contains(rank)) found.push_back(rank);
  return found;
}

int Endpoint::stand_in(Group& group, int group_rank) {
  if (!some_absent_.load(std::memory_order_relaxed)) return group_rank;
  Session session(*this);
  return group.present[static_cast<size_t>(group.place_of(group_rank))];
}

void Endpoint::share_sandbox(const std::set<int>& ranks, double limit_s) {
  Session session(*this);
  sharing_ = ranks;
  sharing_limit_ = std::chrono::milliseconds(static_cast<int64_t>(limit_s * 1e3));
  why_alone_.clear();
  if (!sandbox.load()) return;
  fail_all({Fault::kInterrupted, "this joiner goes on with another batch or with none", -1});
  run();
}

bool Endpoint::shares_sandbox(const std::vector<int>& ranks) {
  Session session(*this);
  return std::all_of(ranks.begin(), ranks.end(), [&](int rank) { return sharing_.contains(rank); });
}

std::chrono::milliseconds Endpoint::sharing_limit() {
  Session session(*this);
  return sharing_limit_;
}

void Endpoint::stop_sharing(const std::string& why) {
  Session session(*this);
  sharing_.clear();
  if (why_alone_.empty()) why_alone_ = why;
}

std::string Endpoint::why_alone() {
  Session session(*this);
  return why_alone_;
}

void Endpoint::remove_group(Group& group) {
  Session session(*this);
  for (auto& operation : group.active) fail(*operation, {Fault::kFailed, operation->name + ": its group was destroyed", -1});
  run();
  auto it = groups_.find(group.id);
  if (it != groups_.end() && it->second == &group) groups_.erase(it);
}

void Endpoint::abort_group(Group& group) {
  Session session(*this);
  for (auto& operation : group.active) fail(*operation, {Fault::kInterrupted, operation->name + ": its group was aborted", -1});
}

void Endpoint::configure(int rank, uint32_t epoch, uint64_t term, const std::map<int, Address>& peers,
                         const std::set<int>& absent) {
  Session session(*this);
  check_open();
  fail_all({Fault::kInterrupted, "the endpoint was configured anew", -1});
  run();
  bool same_rank = rank == rank_;
  rank_ = rank;
  epoch_ = epoch;
  term_ = term;
  configured_ = true;
  while (!prepared_.empty()) drop_prepared(prepared_.begin());
  for (auto& [other, address] : peers) {
    Peer& entry = peer(other);
    if (entry.link && !(same_rank && entry.link->incarnation == address.incarnation)) retire(*entry.link);
    entry.known = other != rank;
    entry.address = address;
    entry.since = epoch;
  }
  for (auto& [other, entry] : peers_) {
    if (entry->greeting) stop_greeting(*entry->greeting);
    if (!peers.contains(other) || other == rank) {
      entry->known = false;
      if (entry->link) retire(*entry->link);
    }
    entry->lost.reset();
    entry->refused = entry->dial_wanted = false;
    entry->leftover.clear();
    if (entry->link) entry->link->purge(epoch);
  }
  leave_out(absent);
  for (auto& [id, group] : groups_) group->sequence = 0;
  changed_.notify_all();
}

void Endpoint::prepare(uint32_t epoch, const std::map<int, Address>& changes, const std::set<int>& absent) {
  Session session(*this);
  check_open();
  if (epoch <= epoch_)
    throw TransportError({Fault::kFailed, "prepare: epoch " + std::to_string(epoch) + " is not after the current epoch " +
                                              std::to_string(epoch_), -1});
  auto it = prepared_.find(epoch);
  if (it == prepared_.end()) {
    prepared_[epoch].changes = changes;
    prepared_[epoch].absent = absent;
    return;
  }
  std::vector<Link*> outdated;
  for (auto& [rank, link] : it->second.links) {
    auto change = changes.find(rank);
    if (change == changes.end() || change->second.incarnation != link->incarnation) outdated.push_back(link);
  }
  for (Link* link : outdated) retire(*link);
  it->second.changes = changes;
  it->second.absent = absent;
}

void Endpoint::drop_prepared(std::map<uint32_t, Prepared>::iterator it) {
  std::vector<Link*> links;
  for (auto& [rank, link] : it->second.links) links.push_back(link);
  for (Link* link : links) retire(*link);
  prepared_.erase(it);
}

void Endpoint::cancel(uint32_t epoch) {
  Session session(*this);
  auto it = prepared_.find(epoch);
  if (it != prepared_.end()) drop_prepared(it);
  kick();
  changed_.notify_all();
}

void Endpoint::dial(uint32_t epoch, const std::vector<int>& ranks, double timeout_s) {
  auto until = now() + std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1000));
  std::vector<Peer*> wanted;
  {
    Session session(*this);
    check_open();
    if (!configured_ || epoch != epoch_)
      throw TransportError({Fault::kFailed, "dial: configure() this endpoint for epoch " + std::to_string(epoch) + " first", -1});
    for (int rank : ranks) {
      if (rank == rank_) continue;
      Peer& other = peer(rank);
      if (!other.known)
        throw TransportError({Fault::kFailed, "dial: rank " + std::to_string(rank) + " is not among the peers", rank});
      other.refused = false;
      other.found_again();
      other.dial_wanted = true;
      other.next_attempt = now();
      want_link(other);
      wanted.push_back(&other);
    }
  }
  Session session(*this);
  if (next_tick_ < wake_at_) kick();
  Peer* missing = nullptr;
  auto opened = [&] {
    missing = nullptr;
    for (Peer* other : wanted)
      if (!other->link) missing = missing && missing->refused ? missing : other;
    return !missing || missing->refused || closing_ || epoch_ != epoch;
  };
  bool in_time = changed_.wait_until(session.lock, until, opened);
  for (Peer* other : wanted) other->dial_wanted = false;
  if (in_time && !missing) return;
  check_open();
  std::string who = missing ? "rank " + std::to_string(missing->rank) + " at " + missing->address.host + ":" +
                                  std::to_string(missing->address.port)
                            : "nobody";
  if (!missing || epoch_ != epoch) throw TransportError({Fault::kFailed, "dial: the epoch changed meanwhile", -1});
  std::string why = missing->problem.empty() ? "no answer" : missing->problem;
  throw TransportError({Fault::kRefused,
                        "no link to " + who + (missing->refused ? ": " : " within " + std::to_string(timeout_s) + " s: ") + why,
                        missing->rank});
}

bool Endpoint::wait_staged(uint32_t epoch, const std::vector<int>& ranks, double timeout_s) {
  auto until = now() + std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1000));
  Session session(*this);
  bool all = false;
  changed_.wait_until(session.lock, until, [&] {
    auto it = prepared_.find(epoch);
    if (closing_ || it == prepared_.end()) return true;
    all = std::all_of(ranks.begin(), ranks.end(),
                      [&](int rank) { return rank == rank_ || it->second.links.contains(rank); });
    return all;
  });
  return all;
}

void Endpoint::switch_to(uint32_t epoch) {
  Session session(*this);
  check_open();
  if (epoch == epoch_) return;
  if (epoch < epoch_)
    throw TransportError({Fault::kFailed, "switch: epoch " + std::to_string(epoch) + " is before the current epoch " +
                                              std::to_string(epoch_), -1});
  fail_all({Fault::kInterrupted, "in flight when the group switched to epoch " + std::to_string(epoch), -1});
  run();
  epoch_ = epoch;
  for (auto& [rank, other] : peers_) {
    other->lost.reset();
    other->refused = false;
    other->leftover.clear();
    if (other->link) other->link->purge(epoch);
  }
  auto it = prepared_.find(epoch);
  if (it != prepared_.end()) {
    std::map<int, Link*> links = std::move(it->second.links);
    for (auto& [rank, address] : it->second.changes) {
      if (rank == rank_) continue;
      Peer& changed = peer(rank);
      if (changed.link && changed.link->incarnation != address.incarnation) retire(*changed.link);
      if (changed.greeting) stop_greeting(*changed.greeting);
      changed.known = true;
      changed.address = address;
      changed.since = epoch;
      changed.next_attempt = TimePoint{};
      changed.problem.clear();
      auto staged = links.find(rank);
      if (staged == links.end()) continue;
      if (changed.link) retire(*changed.link);
      changed.link = staged->second;
      changed.link->staged = false;
      changed.link->purge(epoch);
      open_link(changed);
    }
    it->second.links.clear();
    leave_out(it->second.absent);
  }
  while (!prepared_.empty() && prepared_.begin()->first <= epoch) drop_prepared(prepared_.begin());
  for (auto& [id, group] : groups_) group->sequence = 0;
  changed_.notify_all();  // the thread closes old links when it wakes next: not worth a wake-up now
}

void Endpoint::interrupt(uint32_t epoch) {
  Session session(*this);
  interrupted_through_ = std::max<int64_t>(interrupted_through_, epoch);
  if (!interrupted()) return;
  fail_all({Fault::kInterrupted, "interrupted at epoch " + std::to_string(epoch_), -1});
}

void Endpoint::attach(std::shared_ptr<Tape> next) {
  std::lock_guard<std::mutex> lock(mutex_);
  tape.store(next.get(), std::memory_order_release);
  if (next) tapes_.push_back(std::move(next));
}

void Endpoint::update(uint32_t epoch, const std::map<int, Address>& peers) {
  Session session(*this);
  for (auto& [rank, address] : peers) {
    if (rank == rank_) continue;
    Peer& other = peer(rank);
    if (other.link && other.link->incarnation == address.incarnation) continue;
    if (other.known && epoch < other.since) continue;  // old news
    if (other.link) retire(*other.link);
    if (other.greeting) stop_greeting(*other.greeting);
    other.known = true;
    other.address = address;
    other.since = epoch;
    other.refused = false;
    other.found_again();
    other.next_attempt = TimePoint{};
    if (needed(other)) want_link(other);
  }
  kick();
}

std::vector<int> Endpoint::linked() {
  Session session(*this);
  std::vector<int> ranks;
  for (auto& [rank, other] : peers_)
    if (other->link) ranks.push_back(rank);
  return ranks;
}

std::map<std::string, int64_t> Endpoint::stats() {
  Session session(*this);
  static const char* const kReasons[kVerdicts] = {"accepted", "early",     "stale",        "job",
                                                  "rank",     "duplicate", "unknown_rank", "closing"};
  auto n = [](uint64_t value) { return static_cast<int64_t>(value); };
  size_t staged = 0;
  for (auto& [epoch, prepared] : prepared_) staged += prepared.links.size();
  size_t in_flight = 0;
  TimePoint at = now(), oldest = at;
  for (auto& [id, group] : groups_) {
    in_flight += group->active.size();
    if (!group->active.empty()) oldest = std::min(oldest, group->active.front()->started);  // in the order of their launch
  }
  auto in_collectives = in_flight_total_ + (in_flight_ > 0 ? at - in_flight_since_ : at - at);
  std::map<std::string, int64_t> out{
      {"bytes_sent", n(counters.bytes_sent)},         {"bytes_received", n(counters.bytes_received)},
      {"bytes_dropped", n(counters.bytes_dropped)},   {"frames_sent", n(counters.frames_sent)},
      {"frames_received", n(counters.frames_received)}, {"frames_dropped", n(counters.frames_dropped)},
      {"bad_frames", n(counters.bad_frames)},         {"links", n(links_.size() - staged)},
      {"links_staged", n(staged)},                    {"links_opened", n(counters.links_opened)},
      {"links_lost", n(counters.links_lost)},         {"greetings", n(greetings_.size())},
      {"accepted", n(counters.accepted)},             {"dialled", n(counters.dialled)},
      {"refused_secret", n(counters.bad_handshakes)}, {"epoch", n(epoch_)},
      {"operations_in_flight", n(in_flight)},
      {"oldest_operation_ms", std::chrono::duration_cast<std::chrono::milliseconds>(at - oldest).count()},
      {"in_collectives_us", std::chrono::duration_cast<std::chrono::microseconds>(in_collectives).count()},
  };
  for (uint32_t i = 1; i < kVerdicts; i++) out[std::string("refused_") + kReasons[i]] = n(counters.refused[i]);
  return out;
}

}  // namespace delta
