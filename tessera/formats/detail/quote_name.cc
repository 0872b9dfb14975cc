#include "tessera/formats/detail/quote_name.h"

#include <fmt/format.h>

namespace tessera::detail {

std::string quote_name(std::string_view name) {
  constexpr size_t kShown = 120;
  std::string out = "'";
  for (const char byte : name.substr(0, kShown)) {
    const auto code = static_cast<unsigned char>(byte);
    if (code < 0x20 || code >= 0x7f) {
      out += fmt::format("\\x{:02x}", code);
    } else {
      out += byte;
    }
  }
  return out + (name.size() > kShown ? "...'" : "'");
}

}  // namespace tessera::detail
