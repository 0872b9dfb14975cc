// Where a server listens, as users write it.
//
//   const auto [host, port] = parse_endpoint("[::1]:29500", "--master");
//
// Error kConfig names the setting, `what`, and says what is wrong. Thread-safe.
#pragma once

#include <string>
#include <string_view>
#include <utility>

namespace tessera {

// "HOST:PORT", "[::1]:PORT".
std::pair<std::string, int> parse_endpoint(std::string_view endpoint, std::string_view what);
// 1 to 65535.
int parse_port(std::string_view text, std::string_view what);

}  // namespace tessera
