#include "tessera/text/jinja/marks.h"

namespace tessera::text::jinja {
namespace {

constexpr size_t kMarkBytes = 3;  // EF B7 90 to EF B7 AF

// The position of the first mark at or after `from`, or npos.
size_t find_mark(std::string_view text, size_t from) {
  for (size_t at = text.find("\xEF\xB7", from); at != text.npos; at = text.find("\xEF\xB7", at + 1)) {
    if (at + kMarkBytes > text.size()) break;
    const auto last = static_cast<unsigned char>(text[at + 2]);
    if (last >= 0x90 && last <= 0xAF) return at;
  }
  return text.npos;
}

}  // namespace

bool has_marks(std::string_view text) { return find_mark(text, 0) != text.npos; }

std::string without_marks(std::string_view text, std::string_view replacement) {
  std::string plain;
  size_t done = 0;
  for (size_t at = find_mark(text, 0); at != text.npos; at = find_mark(text, done)) {
    plain.append(text, done, at - done).append(replacement);
    done = at + kMarkBytes;
  }
  return plain.append(text, done);
}

}  // namespace tessera::text::jinja
