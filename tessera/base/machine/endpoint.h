// Parses the address of a server as users write it.
//
//   const auto [host, port] = parse_endpoint("[::1]:29500", "--master");
//
// Error kConfig starts with `setting_name` and names the problem. Thread-safe.
#pragma once

#include <string>
#include <string_view>
#include <utility>

namespace tessera {

// Parses "HOST:PORT" or "[::1]:PORT" into host (without brackets) and port.
std::pair<std::string, int> parse_endpoint(std::string_view endpoint, std::string_view setting_name);
// Parses a port, 1 to 65535.
int parse_port(std::string_view text, std::string_view setting_name);

}  // namespace tessera
