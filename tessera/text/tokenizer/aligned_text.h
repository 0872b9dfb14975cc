// A text between the normalizers and pre-tokenizers, with the input byte range from which each of its bytes was made.
//
// When `tracked`, `origins` has one input range per byte of `text`, and all bytes of one character have the same range.
// Otherwise `origins` is empty. Not thread-safe.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/error.h"

namespace tessera::text {

// A half-open byte range.
struct Span {
  uint32_t begin;
  uint32_t end;
};

constexpr size_t kMaxTextBytes = std::numeric_limits<uint32_t>::max() - 16;

// Checks that a text of `bytes` bytes is not longer than kMaxTextBytes, because a Span has 32-bit positions. Error
// kConfig for a longer text.
inline void check_text_size(size_t bytes) {
  TESSERA_CHECK(bytes <= kMaxTextBytes, ErrorKind::kConfig,
                "[text.encode] text: {} bytes after normalization, at most {} are encoded in one call. Split the text.",
                bytes, kMaxTextBytes);
}

struct AlignedText {
  std::string text;
  std::vector<Span> origins;
  bool tracked = false;

  void clear() {
    text.clear();
    origins.clear();
  }
  // Appends `bytes`; each of them gets the origin `origin`.
  void append(std::string_view bytes, Span origin) {
    check_text_size(text.size() + bytes.size());
    text.append(bytes);
    if (tracked) origins.insert(origins.end(), bytes.size(), origin);
  }
  // Appends `bytes` with one origin per byte. `byte_origins` is read only if `tracked` is true.
  void append(std::string_view bytes, const Span* byte_origins) {
    check_text_size(text.size() + bytes.size());
    text.append(bytes);
    if (tracked) origins.insert(origins.end(), byte_origins, byte_origins + bytes.size());
  }
  // Appends bytes [begin, end) of `other` with their origins.
  void append(const AlignedText& other, size_t begin, size_t end) {
    const auto part = std::string_view(other.text).substr(begin, end - begin);
    append(part, tracked ? other.origins.data() + begin : nullptr);
  }
  Span origin(size_t byte) const { return tracked ? origins[byte] : Span{0, 0}; }
};

}  // namespace tessera::text
