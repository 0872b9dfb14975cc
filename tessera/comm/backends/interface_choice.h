// Chooses the network interface of this host for sockets that ranks of other hosts connect to (watchdog and Gloo).
//
//   const std::string own = own_address("10.0.0.1");      // "10.0.0.7", or "" when only loopback leads there
//
// The user's choice is GLOO_SOCKET_IFNAME, else NCCL_SOCKET_IFNAME, both in the syntax of NCCL_SOCKET_IFNAME: prefixes
// of names separated by commas; "=" in front means whole names, "^" in front means all other interfaces. If several
// interfaces fit, the order is: the interface from which the kernel would send to the other host; the first with an
// address of the same family (IPv4 when the kernel has no route); the first with an address of the other family;
// loopback last. Without a user's choice, the kernel's choice is used. Thread-safe.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/machine/listen.h"

namespace tessera::comm {

// Whether the interface `name` fits the user's choice `setting`.
bool interface_matches(std::string_view setting, std::string_view name);
// Returns the address to use, "" when no interface fits. `kernel_address`: the address that the kernel would use
// towards the other hosts, "" when not known.
std::string choose_address(const std::vector<InterfaceAddress>& interfaces, std::string_view setting,
                           const std::string& kernel_address);

std::string requested_interfaces();  // the user's choice in the environment; "": none
// Returns this host's address for connections with the host `towards`; "" when only loopback leads there. Error kConfig
// when no active interface fits the user's choice.
std::string own_address(const std::string& towards);

}  // namespace tessera::comm
