// Makes text from untrusted files safe for a message, a log line or a listing: one line, without terminal control
// codes.
//
//   raise(ErrorKind::kFormat, "[safetensors] {}: tensor {} is twice in the header", path, quote(name));
//
// Printable UTF-8 stays unchanged. Control characters, direction marks, other invisible characters and bytes that are
// not UTF-8 are written as \n, \t, \x1b or \u202e. Long text is cut between characters and ends with "..."; the cost
// does not depend on the part that is cut. Use escape_controls() for text of several lines on a terminal. Pure,
// thread-safe.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tessera {

inline constexpr size_t kQuotedBytes = 120;

// Returns `text` in the printable form that is described above. At most limit_bytes of `text` are read; if `text` is
// longer, the result is cut and ends with "...".
std::string escape(std::string_view text, size_t limit_bytes = kQuotedBytes);
// escape() between single quotes.
std::string quote(std::string_view text, size_t limit_bytes = kQuotedBytes);

// Replaces control characters (C0, DEL and C1) except \n and \t, and bytes that are not UTF-8, by `mark` and two
// hexadecimal digits: \x1b with the default `mark`. All other text stays unchanged. In a JSON text `mark` must be
// "\\u00".
std::string escape_controls(std::string_view text, std::string_view mark = "\\x");

}  // namespace tessera
