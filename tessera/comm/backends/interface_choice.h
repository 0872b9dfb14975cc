// Which network interface this host's sockets are on that ranks of other hosts reach: the store's, the watch's, Gloo's.
//
//   const std::string own = own_address("10.0.0.1");      // "10.0.0.7", or "" when only loopback leads there
//
// The wish is GLOO_SOCKET_IFNAME, else NCCL_SOCKET_IFNAME, as NCCL reads the latter: prefixes separated by commas, "="
// in front for whole names, "^" in front for all but those. Where several fit, that from which the kernel would go
// there, else the first with an address of the same family, IPv4 where the kernel knows no way, else the first with one
// of the other; loopback last. Without a wish the kernel says. Thread-safe.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/machine/listen.h"

namespace tessera::comm {

bool interface_fits(std::string_view wish, std::string_view name);
// The address to take, "" when nothing fits; `natural` is what the kernel would take towards the others, "" unknown.
std::string choose_address(const std::vector<InterfaceAddress>& interfaces, std::string_view wish,
                           const std::string& natural);

std::string wished_interfaces();  // of the environment; "": none
// Error kConfig when there is a wish and no interface that is up fits it.
std::string own_address(const std::string& towards);

}  // namespace tessera::comm
