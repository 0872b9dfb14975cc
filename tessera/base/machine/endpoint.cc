#include "tessera/base/machine/endpoint.h"

#include "tessera/base/error.h"
#include "tessera/base/text/number.h"

namespace tessera {

int parse_port(std::string_view text, std::string_view setting_name) {
  const int port = parse_number<int>(text).value_or(0);
  TESSERA_CHECK(port > 0 && port < 65536, ErrorKind::kConfig, "[endpoint] {}: '{}' is not a port; wanted 1 to 65535",
                setting_name, text);
  return port;
}

std::pair<std::string, int> parse_endpoint(std::string_view endpoint, std::string_view setting_name) {
  const size_t colon = endpoint.rfind(':');
  TESSERA_CHECK(colon != endpoint.npos && colon > 0, ErrorKind::kConfig, "[endpoint] {} '{}': wanted HOST:PORT",
                setting_name, endpoint);
  std::string_view host = endpoint.substr(0, colon);
  if (host.starts_with('[') && host.ends_with(']') && host.size() > 2) {
    host = host.substr(1, host.size() - 2);
  } else {
    TESSERA_CHECK(host.find(':') == host.npos, ErrorKind::kConfig,
                  "[endpoint] {} '{}': write an IPv6 address as [ADDRESS]:PORT", setting_name, endpoint);
  }
  return {std::string(host), parse_port(endpoint.substr(colon + 1), setting_name)};
}

}  // namespace tessera
