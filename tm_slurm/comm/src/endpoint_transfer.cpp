// Operations and their messages: starting, matching, failing, finishing.
#include <algorithm>
#include <cstring>

#include "endpoint.hpp"

namespace delta {

uint64_t Endpoint::launch(Group& group, Launch launch) {
  auto owned = std::make_unique<Operation>(*this, group, std::move(launch.name));
  Operation* operation = owned.get();
  operation->finished = std::move(launch.finished);
  Session session(*this);
  operation->started = now();
  operation->deadline = operation->started + launch.timeout;
  operation->place = group.active.insert(group.active.end(), std::move(owned));
  if (in_flight_++ == 0) in_flight_since_ = operation->started;
  if (launch.collective) operation->sequence = group.sequence;
  if (closing_) {
    fail(*operation, {Fault::kFailed, operation->name + ": the endpoint is closed", -1});
  } else if (!configured_) {
    fail(*operation, {Fault::kFailed, operation->name + ": call Endpoint.configure() before the first collective", -1});
  } else if (interrupted()) {
    fail(*operation, {Fault::kInterrupted,
                      operation->name + ": interrupted at epoch " + std::to_string(epoch_) + "; waiting for the switch", -1});
  } else {
    if (launch.collective) group.sequence++;
    next_tick_ = std::min(next_tick_, operation->deadline);
    operation->task = launch.body(*operation);
    operation->waiting = operation->task.handle();
    operation->queued = true;
    runnable_.push_back(operation);
  }
  return operation->sequence;
}

void Endpoint::run() {
  while (!runnable_.empty()) {
    Operation* operation = runnable_.front();
    runnable_.pop_front();
    operation->queued = false;
    if (!operation->failure) {
      auto handle = operation->waiting;
      operation->waiting = nullptr;
      operation->awaited = nullptr;
      running_ = operation;
      handle.resume();
      running_ = nullptr;
    }
    if (!operation->failure && !operation->task.done()) continue;
    finish(*operation);
  }
}

void Endpoint::finish(Operation& operation) {
  if (!operation.failure) {
    try {
      operation.task.rethrow();
    } catch (const std::exception& error) {
      operation.failure = Failure{Fault::kFailed, operation.name + ": " + error.what(), -1};
    }
  }
  operation.task.reset();  // its transfers withdraw themselves
  auto& active = operation.group.active;
  finished_.push_back(std::move(*operation.place));
  active.erase(operation.place);
  if (--in_flight_ == 0) in_flight_total_ += now() - in_flight_since_;
}

void Endpoint::deliver(Finished& finished) {
  for (auto& operation : finished) 
    operation->finished(operation->failure ? &*operation->failure : nullptr, operation->source_rank);
  finished.clear();
}

void Endpoint::fail(Operation& operation, Failure failure) {
  if (operation.failure) return;
  operation.failure = std::move(failure);
  if (&operation == running_ || operation.queued) return;
  operation.queued = true;
  runnable_.push_back(&operation);
}

void Endpoint::fail_all(const Failure& failure) {
  for (auto& [id, group] : groups_)
    for (auto& operation : group->active) {
      Failure named = failure;
      named.message = operation->name + " in group " + group->name + ": " + failure.message;
      fail(*operation, named);
    }
}

void Endpoint::fail_peer(Peer& peer) {
  const Failure& failure = *peer.lost;
  for (Send* send : peer.sends) fail(send->operation, failure);
  for (Recv* recv : peer.recvs) fail(recv->operation, failure);
  for (auto& [id, group] : groups_)
    for (Recv* recv : group->posted)
      if (recv->peer == &peer) fail(recv->operation, failure);
}

void Endpoint::complete(Send& send) {
  if (send.done) return;
  send.peer->sends.remove(&send);
  completed(send);
}

void Endpoint::complete(Recv& recv) {
  if (recv.done) return;
  recv.peer->recvs.remove(&recv);
  completed(recv);
}

void Endpoint::completed(Transfer& transfer) {
  transfer.done = true;
  Operation& operation = transfer.operation;
  if (operation.awaited != &transfer || operation.queued) return;
  operation.queued = true;
  runnable_.push_back(&operation);
}

void Endpoint::post(Send& send) {
  Peer& to = *send.peer;
  if (to.lost) return fail(send.operation, *to.lost);
  to.sends.push_back(&send);
  if (!to.link) return want_link(to);
  if (!send.granted) {
    auto& grants = to.link->grants;
    auto it = std::find(grants.begin(), grants.end(), send.key);
    if (it != grants.end()) {
      grants.erase(it);
      send.granted = true;
    }
  }
  if (send.has_frame()) {
    Link& link = *to.link;  // when the write finds it broken, the peer has it no more
    link.write(kMaxFrameBytes);
    make_ready(link);
  }
}

void Endpoint::post(Recv& recv) {
  auto wanted = [&](const Unexpected& message) {
    if (!recv.posted) return message.key == recv.key;
    return message.key.epoch == epoch_ && message.key.group == recv.key.group &&
           is_point_to_point(message.key.tag) && user_tag_of(message.key.tag) == user_tag_of(recv.key.tag);
  };
  auto look = [&](Peer& from) {
    for (auto* list : {&from.leftover, from.link ? &from.link->unexpected : nullptr}) {
      if (!list) continue;
      auto it = std::find_if(list->begin(), list->end(), wanted);
      if (it == list->end()) continue;
      if (recv.posted) {
        recv.posted = false;
        recv.peer = &from;
        recv.key = it->key;
      }
      for (int rank = 0; rank < recv.operation.group.size(); rank++)
        if (recv.operation.group.members[static_cast<size_t>(rank)] == &from) recv.operation.source_rank = rank;
      from.recvs.push_back(&recv);
      if (list == &from.leftover) {
        if (it->offer) return fail(recv.operation, *from.lost), true;
        if (size_agrees(recv, it->total, from.rank)) {
          if (!it->data.empty()) recv.take(it->data.data(), it->data.size());
          recv.confirm();
        }
        list->erase(it);
      } else {
        accept_unexpected(*from.link, it, recv);
      }
      return true;
    }
    return false;
  };
  if (recv.peer) {
    Peer& from = *recv.peer;
    if (look(from)) return;
    if (from.lost) return fail(recv.operation, *from.lost);
  } else {
    for (Peer* from : recv.operation.group.members)
      if (from && look(*from)) return;
  }
  if (recv.posted) {
    recv.operation.group.posted.push_back(&recv);
    for (Peer* from : recv.operation.group.members)
      if (from && (!recv.peer || recv.peer == from)) want_link(*from);
    return;
  }
  recv.peer->recvs.push_back(&recv);
  if (!recv.peer->link) return want_link(*recv.peer);
  if (recv.large()) grant(recv);
}

void Endpoint::accept_unexpected(Link& link, std::list<Unexpected>::iterator message, Recv& recv) {
  bool agrees = size_agrees(recv, message->total, link.peer.rank);
  bool offer = message->offer, complete = message->complete;
  size_t got = message->got;
  std::vector<char> data = std::move(message->data);
  bool arriving = link.in_unexpected_ == &*message;
  link.unexpected_bytes_ -= data.size();
  link.unexpected.erase(message);
  if (arriving) link.in_unexpected_ = nullptr;
  make_ready(link);  // it may have stopped reading for want of room
  if (!agrees) return;
  if (offer) return grant(recv);
  if (got > 0) recv.take(data.data(), got);
  if (complete) return recv.confirm();
  if (arriving) {
    link.in_recv_ = &recv;
    recv.busy = &link;
  }
}

bool Endpoint::size_agrees(Recv& recv, uint64_t total, int rank) {
  if (recv.total == total) return true;
  fail(recv.operation, {Fault::kFailed,
                        recv.operation.name + " in group " + recv.operation.group.name + ": rank " + std::to_string(rank) +
                            " sent " + std::to_string(total) + " bytes where " + std::to_string(recv.total) +
                            " were expected; tensors must have the same size on all ranks",
                        rank});
  return false;
}

Recv* Endpoint::match(Link& link, const MessageKey& key, uint64_t total) {
  failed_match_ = false;
  Peer& from = link.peer;
  if (from.link != &link || key.epoch != epoch_) return nullptr;
  for (Recv* recv : from.recvs) {
    if (!(recv->key == key)) continue;
    failed_match_ = !size_agrees(*recv, total, from.rank);
    return failed_match_ ? nullptr : recv;
  }
  auto group = groups_.find(key.group);
  if (!is_point_to_point(key.tag) || group == groups_.end()) return nullptr;
  auto& posted = group->second->posted;
  for (auto it = posted.begin(); it != posted.end(); ++it) {
    Recv& recv = **it;
    if ((recv.peer && recv.peer != &from) || user_tag_of(recv.key.tag) != user_tag_of(key.tag)) continue;
    posted.erase(it);
    recv.posted = false;
    recv.peer = &from;
    recv.key = key;
    from.recvs.push_back(&recv);
    auto& members = group->second->members;
    recv.operation.source_rank = static_cast<int>(std::find(members.begin(), members.end(), &from) - members.begin());
    failed_match_ = !size_agrees(recv, total, from.rank);
    return failed_match_ ? nullptr : &recv;
  }
  return nullptr;
}

void Endpoint::grant(Recv& recv) {
  recv.granted = true;
  Link& link = *recv.peer->link;
  link.control(FrameKind::kGrant, recv.key, recv.total);
  link.write(kMaxFrameBytes);
  make_ready(link);
}

void Endpoint::granted(Link& link, const MessageKey& key) {
  if (link.peer.link == &link)
    for (Send* send : link.peer.sends)
      if (send->key == key) {
        send->granted = true;
        return make_ready(link);
      }
  link.grants.push_back(key);
}

void Endpoint::withdraw(Send& send) {
  if (send.busy) send.busy->out_send = nullptr;  // the rest of the frame is padded and void
  send.busy = nullptr;
  send.peer->sends.remove(&send);
}

void Endpoint::withdraw(Recv& recv) {
  if (recv.busy) recv.busy->abandon_in();
  if (recv.posted) recv.operation.group.posted.remove(&recv);
  if (recv.peer) recv.peer->recvs.remove(&recv);
}

std::string Endpoint::describe(const Operation& operation) const {
  std::string text;
  auto add = [&](const Transfer& transfer, const char* verb) {
    if (&transfer.operation != &operation || text.size() > 400) return;
    text += std::string(text.empty() ? "" : ", ") + verb + " rank " + std::to_string(transfer.peer->rank) +
            (transfer.peer->known ? " at " + transfer.peer->address.host : "") + " (" +
            std::to_string(transfer.moved) + " of " + std::to_string(transfer.total) + " bytes";
    if (!transfer.peer->link) {
      const std::string& why = transfer.peer->problem;
      text += why.empty() ? "; it has not opened a link" : "; no link: " + why;
    }
    text += ")";
  };
  for (const Peer* peer : operation.group.members) {
    if (!peer) continue;
    for (const Recv* recv : peer->recvs) add(*recv, "receiving from");
    for (const Send* send : peer->sends) add(*send, "sending to");
  }
  for (const Recv* recv : operation.group.posted)
    if (&recv->operation == &operation)
      text += recv->peer ? "no message yet from rank " + std::to_string(recv->peer->rank) : "no message yet from any rank";
  return text.empty() ? "nothing" : text;
}

}  // namespace delta
