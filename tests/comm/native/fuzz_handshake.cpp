// Random bytes at both sides of the handshake: it may fail, and nothing else.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "handshake.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using delta::Handshake;
  delta::Identity mine;
  for (bool dialling : {true, false}) {
    auto handshake = dialling ? Handshake::dialler("secret", mine) : Handshake::acceptor("secret");
    if (dialling) handshake.opening();
    size_t at = 0;
    while (handshake.state() == Handshake::State::kTalking) {
      size_t wanted = handshake.wanted();
      if (wanted == 0 || wanted > Handshake::kLargest) __builtin_trap();
      if (size - at < wanted) break;
      unsigned char message[Handshake::kLargest];
      std::memcpy(message, data + at, wanted);
      at += wanted;
      handshake.feed(message);
    }
    auto state = handshake.state();
    if (state == Handshake::State::kDone || state == Handshake::State::kDeciding) __builtin_trap();  // without the secret
  }
  return 0;
}
