// Names out of untrusted files, fit for a one-line message: quoted, everything but printable ASCII escaped, cut at 120
// bytes.
#pragma once

#include <string>
#include <string_view>

namespace tessera::detail {

std::string quote_name(std::string_view name);

}  // namespace tessera::detail
