// Text out of untrusted files, fit for a message, a log line or a listing: one line, nothing that a terminal obeys.
//
//   raise(ErrorKind::kFormat, "[safetensors] {}: tensor {} is twice in the header", path, quote(name));
//
// What is printable UTF-8 stays as it is; control characters, direction marks, other invisible characters and bytes
// that are no UTF-8 are shown as \n, \t, \x1b or \u202e. Long text is cut between characters and ends with "...". Cost
// does not depend on what is cut away. Text of several lines for a terminal goes through escape_controls(). Pure,
// thread-safe.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tessera {

inline constexpr size_t kQuotedBytes = 120;

// At most limit_bytes of `text` are looked at.
std::string escape(std::string_view text, size_t limit_bytes = kQuotedBytes);
// The same between single quotes.
std::string quote(std::string_view text, size_t limit_bytes = kQuotedBytes);

// All of it as it is but control characters (C0, DEL and C1) other than \n and \t, and bytes that are no UTF-8, which
// are shown as \x1b. `mark` stands before the two hexadecimal digits of a character; "\\u00" is JSON's.
std::string escape_controls(std::string_view text, std::string_view mark = "\\x");

}  // namespace tessera
