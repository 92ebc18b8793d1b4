// Random bytes behind a proper handshake: that link may be closed, and nothing else happens. The endpoint that is fed
// also has a collective in flight with another rank, which must end well.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "world.hpp"

namespace delta {
namespace {

// An authenticated connection to rank 0, as the rank and incarnation that it expects.
int connect_as(const Endpoint& to, int rank, uint64_t incarnation) {
  int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(to.port()));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CHECK(::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  Identity mine;
  mine.job = sha256(kJob);
  mine.rank = rank;
  mine.target = 0;
  mine.incarnation = incarnation;
  auto handshake = Handshake::dialler(kSecret, mine);
  std::string out = handshake.opening();
  while (handshake.state() == Handshake::State::kTalking) {
    CHECK(::send(fd, out.data(), out.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(out.size()));
    unsigned char message[Handshake::kLargest];
    if (::recv(fd, message, handshake.wanted(), MSG_WAITALL) != static_cast<ssize_t>(handshake.wanted())) break;
    out = handshake.feed(message);
  }
  if (handshake.state() == Handshake::State::kDone && handshake.verdict() == Verdict::kAccepted) return fd;
  ::close(fd);
  return -1;
}

struct Target {
  Target() : world(2, 1) {
    auto peers = world.table();
    peers[2] = Address{"127.0.0.1", 1, 0};  // who feeds the garbage
    world.ranks[0]->endpoint->configure(0, 0, 1, peers);
  }
  World world;
};

}  // namespace
}  // namespace delta

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace delta;
  static Target target;
  static uint64_t runs = 0;
  Endpoint& endpoint = *target.world.ranks[0]->endpoint;
  int fd = -1;
  for (int tries = 0; fd < 0 && tries < 1000; tries++) {  // the last one's link may not be gone yet
    fd = connect_as(endpoint, 2, 0);
    if (fd < 0) ::usleep(100);
  }
  CHECK(fd >= 0);
  (void)!::send(fd, data, size, MSG_NOSIGNAL);
  ::shutdown(fd, SHUT_WR);
  char sink[4096];
  while (::recv(fd, sink, sizeof sink, 0) > 0) {
  }
  ::close(fd);
  if (runs++ % 16 == 0) {
    std::vector<float> values[2] = {std::vector<float>(3000, 1.0f), std::vector<float>(3000, 2.0f)};
    std::vector<std::future<std::optional<Failure>>> futures;
    for (size_t rank = 0; rank < 2; rank++) {
      char* at = reinterpret_cast<char*>(values[rank].data());
      futures.push_back(target.world.ranks[rank]->start(0, [at](Operation& op) { return all_reduce(op, at, 3000, kSum); }));
    }
    for (auto& future : futures) CHECK(!future.get());
    for (float value : values[0]) CHECK(value == 3.0f);
  }
  return 0;
}
