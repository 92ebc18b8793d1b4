// A connection that has not proved itself yet: being dialled, or just accepted.
#pragma once
#include "handshake.hpp"
#include "link.hpp"

namespace delta {

class Greeting final : public Source {
 public:
  Greeting(Endpoint& endpoint, int fd);                                            // accepted
  Greeting(Endpoint& endpoint, int fd, Peer& peer, const Identity& mine, bool connected);  // ours

  void on_events(uint32_t events) override;
  Peer* peer() const { return peer_; }
  TimePoint deadline;

 private:
  friend class Endpoint;
  void advance();
  void failed(const std::string& problem, bool for_good);
  void decided();
  bool flush();

  Endpoint& endpoint_;
  Peer* peer_;
  uint64_t wanted_incarnation_ = 0;
  Handshake handshake_;
  bool connecting_;
  unsigned char in_[Handshake::kLargest];
  size_t got_ = 0;
  std::string out_;
};

}  // namespace delta
