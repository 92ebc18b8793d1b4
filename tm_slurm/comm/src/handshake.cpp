#include "handshake.hpp"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <cstring>
#include <stdexcept>

namespace delta {
namespace {

constexpr uint64_t kMagic = 0x31306b6e696c4d54ull;  // "TMlink01"
constexpr size_t kHello = 8 + 32;
constexpr size_t kProof = sizeof(Identity) + kMacBytes;
constexpr size_t kAnswer = 4 + sizeof(Identity) + kMacBytes;
static_assert(kAnswer <= Handshake::kLargest && kProof <= Handshake::kLargest);

template <class T>
void put(std::string& out, const T& value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

std::string hello(Nonce& nonce) {
  if (RAND_bytes(nonce.data(), static_cast<int>(nonce.size())) != 1) throw std::runtime_error("no random numbers");
  std::string out;
  put(out, kMagic);
  put(out, nonce);
  return out;
}

bool read_hello(const unsigned char* data, Nonce& nonce) {
  uint64_t magic = 0;
  std::memcpy(&magic, data, sizeof magic);
  std::memcpy(nonce.data(), data + sizeof magic, nonce.size());
  return magic == kMagic;
}

}  // namespace

const char* verdict_text(Verdict verdict) {
  switch (verdict) {
    case Verdict::kAccepted: return "accepted";
    case Verdict::kEarly: return "early: this incarnation is not in the other side's tables yet";
    case Verdict::kStale: return "stale: a newer incarnation of this rank has taken over";
    case Verdict::kWrongJob: return "another job";
    case Verdict::kWrongRank: return "another rank answers at this address";
    case Verdict::kDuplicate: return "there is a link already";
    case Verdict::kUnknownRank: return "no such rank in this job";
    case Verdict::kClosing: return "the other side is closing";
  }
  return "unknown verdict";
}

Digest sha256(const std::string& text) {
  Digest digest{};
  unsigned int length = 0;
  if (EVP_Digest(text.data(), text.size(), digest.data(), &length, EVP_sha256(), nullptr) != 1 || length != kMacBytes)
    throw std::runtime_error("SHA-256 is not available in libcrypto");
  return digest;
}

Handshake::Handshake(std::string secret, bool dialling)
    : secret_(std::move(secret)), dialling_(dialling), wanted_(kHello) {}

Handshake Handshake::dialler(const std::string& secret, const Identity& mine) {
  Handshake handshake(secret, true);
  handshake.dialler_identity_ = mine;
  return handshake;
}

Handshake Handshake::acceptor(const std::string& secret) { return Handshake(secret, false); }

Digest Handshake::mac(const char* label, uint32_t verdict, bool with_acceptor) const {
  std::string text(label);
  put(text, dialler_nonce_);
  put(text, acceptor_nonce_);
  put(text, dialler_identity_);
  if (with_acceptor) {
    put(text, verdict);
    put(text, acceptor_identity_);
  }
  Digest digest{};
  unsigned int length = 0;
  const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
  if (HMAC(EVP_sha256(), secret_.data(), static_cast<int>(secret_.size()), bytes, text.size(), digest.data(),
           &length) == nullptr ||
      length != kMacBytes)
    throw std::runtime_error("HMAC-SHA-256 is not available in libcrypto");
  return digest;
}

std::string Handshake::fail(const char* problem) {
  state_ = State::kFailed;
  problem_ = problem;
  wanted_ = 0;
  return {};
}

std::string Handshake::opening() { return hello(dialler_nonce_); }

std::string Handshake::feed(const unsigned char* data) {
  if (state_ != State::kTalking) return fail("a message too many");
  Digest theirs{};
  if (stage_++ == 0) {
    if (!read_hello(data, dialling_ ? acceptor_nonce_ : dialler_nonce_)) return fail("not a link of tm_slurm");
    if (!dialling_) {
      wanted_ = kProof;
      return hello(acceptor_nonce_);
    }
    wanted_ = kAnswer;
    std::string out;
    put(out, dialler_identity_);
    put(out, mac("tm dialler", 0, false));
    return out;
  }
  wanted_ = 0;
  if (!dialling_) {
    std::memcpy(&dialler_identity_, data, sizeof(Identity));
    std::memcpy(theirs.data(), data + sizeof(Identity), kMacBytes);
    Digest expected = mac("tm dialler", 0, false);
    if (CRYPTO_memcmp(expected.data(), theirs.data(), kMacBytes) != 0) return fail("the secret differs");
    remote_ = dialler_identity_;
    state_ = State::kDeciding;
    return {};
  }
  uint32_t verdict = 0;
  std::memcpy(&verdict, data, sizeof verdict);
  std::memcpy(&acceptor_identity_, data + sizeof verdict, sizeof(Identity));
  std::memcpy(theirs.data(), data + sizeof verdict + sizeof(Identity), kMacBytes);
  Digest expected = mac("tm acceptor", verdict, true);
  if (CRYPTO_memcmp(expected.data(), theirs.data(), kMacBytes) != 0) return fail("the secret differs");
  if (verdict >= kVerdicts) return fail("unknown verdict");
  verdict_ = static_cast<Verdict>(verdict);
  remote_ = acceptor_identity_;
  state_ = State::kDone;
  return {};
}

std::string Handshake::answer(Verdict verdict, const Identity& mine) {
  verdict_ = verdict;
  acceptor_identity_ = mine;
  state_ = State::kDone;
  std::string out;
  put(out, static_cast<uint32_t>(verdict));
  put(out, acceptor_identity_);
  put(out, mac("tm acceptor", static_cast<uint32_t>(verdict), true));
  return out;
}

}  // namespace delta
