// The mutual challenge that each connection begins with: four fixed-size messages, no input/output in here.
//   dialler -> acceptor  magic, nonce
//   acceptor -> dialler  magic, nonce
//   dialler -> acceptor  identity, HMAC(secret, "dialler", both nonces, identity)
//   acceptor -> dialler  verdict, identity, HMAC(secret, "acceptor", both nonces, verdict, both identities)
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace delta {

constexpr size_t kMacBytes = 32;
using Digest = std::array<unsigned char, kMacBytes>;
using Nonce = std::array<unsigned char, 32>;

struct Identity {
  Digest job{};  // SHA-256 of the job's name
  int32_t rank = -1;
  int32_t target = -1;  // the rank that the sender believes to talk to
  uint64_t incarnation = 0;
  uint64_t term = 0;
  uint32_t epoch = 0;
  uint32_t reserved = 0;
};
static_assert(sizeof(Identity) == 64, "the identity is part of the protocol");

enum class Verdict : uint32_t {
  kAccepted = 0,
  kEarly = 1,      // not (yet) in the acceptor's tables: try again
  kStale = 2,      // an older incarnation of this rank: fenced off
  kWrongJob = 3,
  kWrongRank = 4,  // the acceptor is not the rank that the dialler looks for
  kDuplicate = 5,  // there is a link already, or one is being opened from the other side
  kUnknownRank = 6,
  kClosing = 7,
};
constexpr uint32_t kVerdicts = 8;
const char* verdict_text(Verdict verdict);

Digest sha256(const std::string& text);

class Handshake {
 public:
  enum class State { kTalking, kDeciding, kDone, kFailed };

  // A dialler states `mine` at once; an acceptor states it in answer().
  static Handshake dialler(const std::string& secret, const Identity& mine);
  static Handshake acceptor(const std::string& secret);

  // How many bytes the next message of the other side has; never more than kLargest.
  size_t wanted() const { return wanted_; }
  // Exactly wanted() bytes. Returns what to send now (may be empty); look at state() afterwards.
  std::string feed(const unsigned char* data);
  std::string opening();                                       // dialler: the first message
  std::string answer(Verdict verdict, const Identity& mine);   // acceptor in kDeciding

  State state() const { return state_; }
  Verdict verdict() const { return verdict_; }
  const Identity& remote() const { return remote_; }
  const char* problem() const { return problem_; }

  static constexpr size_t kLargest = 128;

 private:
  Handshake(std::string secret, bool dialling);
  Digest mac(const char* label, uint32_t verdict, bool with_acceptor) const;
  std::string fail(const char* problem);

  std::string secret_;
  bool dialling_;
  int stage_ = 0;
  size_t wanted_;
  State state_ = State::kTalking;
  Verdict verdict_ = Verdict::kAccepted;
  Nonce dialler_nonce_{}, acceptor_nonce_{};
  Identity dialler_identity_{}, acceptor_identity_{}, remote_{};
  const char* problem_ = "";
};

}  // namespace delta
