// Frames: what travels on a link after the handshake. Nothing here allocates or does input/output.
#pragma once
#include <cstddef>
#include <cstdint>

namespace delta {

// A message is cut into frames of at most this many payload bytes, so that a large one cannot hold up the others.
constexpr uint32_t kMaxFrameBytes = 256u << 10;
// Messages up to this size are sent at once; larger ones wait until the receiver has said where they go (Grant).
constexpr uint64_t kEagerBytes = 64u << 10;
constexpr uint32_t kFrameMagic = 0x314d5431u;  // "1TM1"

enum class FrameKind : uint8_t {
  kData = 1,   // payload of a message
  kGrant = 2,  // the receiver has posted its buffer: send message (group, tag)
  kOffer = 3,  // a large point-to-point message is waiting at the sender
  kPing = 4,   // nothing to say, still here
};

// Which message: sequence numbers in `tag` start again at each epoch.
struct MessageKey {
  uint32_t epoch = 0;
  uint64_t group = 0;
  uint64_t tag = 0;
  bool operator==(const MessageKey&) const = default;
};

// After the payload comes one byte. An operation that is given up in the middle of a frame cannot take it back: the
// rest is padded and marked void, so that the link stays usable and nobody takes the padding for data.
constexpr char kGood = '\x5a';
constexpr char kVoid = '\x00';

struct FrameHeader {
  uint32_t magic = kFrameMagic;
  FrameKind kind = FrameKind::kData;
  uint8_t reserved[3] = {0, 0, 0};
  uint32_t epoch = 0;
  uint32_t length = 0;  // payload bytes that follow
  uint64_t group = 0;
  uint64_t tag = 0;
  uint64_t total = 0;  // bytes of the whole message

  MessageKey key() const { return {epoch, group, tag}; }
};
static_assert(sizeof(FrameHeader) == 40, "the header is part of the protocol");

// Tags. Collectives: sequence number and step. Point-to-point: the user's tag and a counter of the sender's link.
constexpr uint64_t kPointToPoint = 1ull << 63;
constexpr unsigned kStepBits = 24;
inline uint64_t collective_tag(uint64_t sequence, uint32_t step) { return (sequence << kStepBits) | step; }
inline uint64_t point_to_point_tag(uint32_t user_tag, uint32_t counter) {
  return kPointToPoint | (static_cast<uint64_t>(user_tag & 0x7fffffffu) << 32) | counter;
}
inline bool is_point_to_point(uint64_t tag) { return (tag & kPointToPoint) != 0; }
inline uint32_t user_tag_of(uint64_t tag) { return static_cast<uint32_t>(tag >> 32) & 0x7fffffffu; }

// nullptr if the header can be obeyed, else what is wrong with it. Checked before anything is done with a length.
inline const char* header_problem(const FrameHeader& header) {
  if (header.magic != kFrameMagic) return "not a frame";
  if (header.length > kMaxFrameBytes) return "frame longer than the protocol allows";
  if (header.length > header.total) return "frame longer than its message";
  switch (header.kind) {
    case FrameKind::kData:
      if (header.total <= kEagerBytes && header.length != header.total) return "small message in pieces";
      if (header.total > kEagerBytes && header.length == 0) return "empty piece of a message";
      return nullptr;
    case FrameKind::kGrant:
    case FrameKind::kPing:
      return header.length == 0 ? nullptr : "control frame with a payload";
    case FrameKind::kOffer:
      if (header.length != 0) return "control frame with a payload";
      return is_point_to_point(header.tag) && header.total > kEagerBytes ? nullptr : "offer of a message that needs none";
  }
  return "unknown kind of frame";
}

}  // namespace delta
