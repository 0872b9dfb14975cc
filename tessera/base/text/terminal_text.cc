#include "tessera/base/text/terminal_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "tessera/base/text/utf8.h"

namespace tessera {

std::string escape_controls(std::string_view text, std::string_view mark) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const size_t length = utf8_character(text.substr(at));
    const uint32_t code = length == 0 ? static_cast<unsigned char>(text[at]) : decode_utf8(text.data() + at).code;
    const bool is_control = code < 0x20 || (code >= 0x7F && code < 0xA0);
    if (length == 0 || (is_control && code != '\n' && code != '\t')) {
      fmt::format_to(std::back_inserter(out), "{}{:02x}", mark, code);
    } else {
      out.append(text.substr(at, length));
    }
    at += std::max<size_t>(length, 1);
  }
  return out;
}

}  // namespace tessera
