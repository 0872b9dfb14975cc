// The protocol between RunStore (client) and RunStoreServer over TCP (docs/format/store.md). Internal to comm.
//
//   std::string frame = FrameWriter(RunStoreRequest::kSet).put("key").put("value").finish();
//   FrameReader reader(body);  const auto key = reader.take();
//
// A frame is the 32-bit length of the rest of the frame, one byte (RunStoreRequest or RunStoreAnswer), and strings,
// each with a 32-bit length.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "tessera/base/error.h"

namespace tessera::comm {

inline constexpr uint32_t kStoreMagic = 0x31525354;         // "TSR1"
inline constexpr size_t kMaxStoreFrame = size_t{64} << 20;  // bytes
inline constexpr size_t kMaxStoreHello = size_t{1} << 16;   // bytes; limit before the hello was accepted

// Requests. A connection begins with kHello. Each request but kCancel has one answer; kWait and kGet are answered once
// all their keys are set.
enum class RunStoreRequest : uint8_t {
  kHello = 1,   // magic, token, run, who -> kOk, kWrongToken or kWrongRun, and JSON: {} or the server's run and who
  kSet,         // key, value
  kCompareSet,  // key, expected, desired -> value
  kGet,         // keys -> values
  kAdd,         // key, number -> number
  kDelete,      // key -> kOk or kNo
  kCheck,       // keys -> kOk or kNo
  kWait,        // keys -> kOk
  kCount,       // -> number of keys
  kAppend,      // key, value
  kCancel       // ends a waiting kGet or kWait, which is then answered with kNo unless it has been answered already
};
enum class RunStoreAnswer : uint8_t { kOk = 0, kNo, kWrongToken, kWrongRun };

// Builds a frame. Error kComm when it is longer than kMaxStoreFrame.
class FrameWriter {
 public:
  template <class Kind>
  explicit FrameWriter(Kind kind) : bytes_(sizeof(uint32_t), '\0') {
    bytes_.push_back(static_cast<char>(kind));
  }
  FrameWriter& put(std::string_view text) {
    const auto length = static_cast<uint32_t>(text.size());
    bytes_.append(reinterpret_cast<const char*>(&length), sizeof length);
    bytes_.append(text);
    return *this;
  }
  FrameWriter& put(const char* text) { return put(std::string_view(text)); }
  FrameWriter& put(int64_t number) {
    return put(std::string_view(reinterpret_cast<const char*>(&number), sizeof number));
  }
  std::string finish() {
    const auto length = static_cast<uint32_t>(bytes_.size() - sizeof(uint32_t));
    TESSERA_CHECK(length <= kMaxStoreFrame, ErrorKind::kComm, "[comm.store] a message of {} bytes, wanted {} at most",
                  length, kMaxStoreFrame);
    std::memcpy(bytes_.data(), &length, sizeof length);
    return std::move(bytes_);
  }

 private:
  std::string bytes_;
};

// Reads the kind and the strings of a frame without its length field. Error kComm when the frame ends inside a string.
class FrameReader {
 public:
  explicit FrameReader(std::string_view frame) : unread_(frame) {
    if (unread_.empty()) fail();
    kind_ = static_cast<uint8_t>(unread_.front());
    unread_.remove_prefix(1);
  }
  uint8_t kind() const { return kind_; }
  bool at_end() const { return unread_.empty(); }
  std::string_view take() {
    uint32_t length = 0;
    if (unread_.size() < sizeof length) fail();
    std::memcpy(&length, unread_.data(), sizeof length);
    unread_.remove_prefix(sizeof length);
    if (unread_.size() < length) fail();
    const std::string_view text = unread_.substr(0, length);
    unread_.remove_prefix(length);
    return text;
  }
  int64_t take_number() {
    int64_t number = 0;
    const std::string_view bytes = take();
    if (bytes.size() != sizeof number) fail();
    std::memcpy(&number, bytes.data(), sizeof number);
    return number;
  }

 private:
  [[noreturn]] static void fail() {
    raise(ErrorKind::kComm, "[comm.store] a frame of the store's protocol is cut short");
  }
  std::string_view unread_;
  uint8_t kind_ = 0;
};

}  // namespace tessera::comm
