// A link: one authenticated connection to one incarnation of a rank, shared by all groups.
#pragma once
#include <sys/uio.h>

#include <list>
#include <string>
#include <vector>

#include "transfer.hpp"

namespace delta {

// Anything that epoll watches.
class Source {
 public:
  explicit Source(int fd) : fd(fd) {}
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;
  virtual ~Source();
  virtual void on_events(uint32_t events) = 0;
  int fd;
  bool retired = false;
};

class Link final : public Source {
 public:
  Link(Endpoint& endpoint, int fd, Peer& peer, uint64_t incarnation);

  void on_events(uint32_t events) override;
  bool pump(size_t budget);   // read and write; true if there is more to do at once
  void write(size_t budget);  // what can be sent without blocking
  void control(FrameKind kind, const MessageKey& key, uint64_t total);
  void purge(uint32_t before_epoch);  // forget messages of older epochs
  void abandon_in();                  // the receive that a frame is being read into is gone
  void detach();                      // transfers must not point here any more

  Peer& peer;
  const uint64_t incarnation;
  bool staged = false;
  bool queued = false;  // in the endpoint's ready list
  std::list<Unexpected> unexpected;
  std::vector<MessageKey> grants;
  TimePoint heard{}, spoke{};
  Send* out_send = nullptr;
  uint32_t message_counter = 0;  // of point-to-point sends

 private:
  void read(size_t budget);
  bool consume(const char* bytes, size_t count);
  bool header_complete();
  void data_header();
  void offer_header();
  void end_of_frame(bool good);
  Send* choose();
  void broken(const std::string& why);
  bool congested() const { return unexpected_bytes_ > kUnexpectedLimit; }

  static constexpr size_t kUnexpectedLimit = 64u << 20;

  Endpoint& endpoint_;
  bool readable_ = true, writable_ = true, hung_up_ = false;

  FrameHeader in_{};
  size_t in_header_ = 0;  // bytes of the header read
  size_t in_left_ = 0;    // payload bytes still to come
  Recv* in_recv_ = nullptr;
  Unexpected* in_unexpected_ = nullptr;
  size_t unexpected_bytes_ = 0;
  friend class Endpoint;

  std::string control_;  // whole control frames waiting
  size_t control_sent_ = 0;
  FrameHeader out_{};
  size_t out_header_ = 0;  // bytes of the header sent
  size_t out_left_ = 0;    // payload bytes still to send; zeros if out_send is gone
  size_t out_trailer_ = 0;
  bool out_frame_ = false;
  const Operation* last_ = nullptr;
};

}  // namespace delta
