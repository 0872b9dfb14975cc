// A TCP socket that listens where its clients can reach it, and on no other interface.
//
//   const ListeningSocket here = listen_at("127.0.0.1", 0, ListenScope::kThisHost);
//   const ListeningSocket master = listen_at(master_address, 29500, ListenScope::kOtherHosts);
//
// Thread-safe.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/files/unique_fd.h"

namespace tessera {

enum class ListenScope { kThisHost, kOtherHosts };

struct ListeningSocket {
  UniqueFd socket;
  std::string address;  // numeric address at which this host itself reaches the socket
  int port = 0;
  bool on_all_interfaces = false;  // true: listens on all interfaces
};

// Listens on `port`; 0 chooses a free port. kThisHost: on the address to which `host` resolves here. kOtherHosts: on
// this address, too, if it is a non-loopback address of this host; else on all interfaces, because the name may resolve
// differently on other hosts ("localhost", Debian's 127.0.1.1 for the own name, the forwarded address of a service).
// The literal addresses 127.0.0.1 and ::1 are always used as given. Errors: kConfig when the name does not exist or is
// not an address of this host; kComm when the port is in use.
ListeningSocket listen_at(const std::string& host, int port, ListenScope scope);

// This host's numeric address on the route to `host`, as the kernel chooses it; nothing is sent. "" without a route, or
// if the route is loopback.
std::string address_towards(const std::string& host);

struct InterfaceAddress {
  std::string name, address;  // "eth0", numeric
};
// All addresses of interfaces that are up, without link-local IPv6 addresses.
std::vector<InterfaceAddress> interfaces_of_this_host();
bool is_loopback(std::string_view address);  // `address` is numeric
// The addresses of interfaces_of_this_host() that are not loopback, each once.
std::vector<std::string> interface_addresses();

}  // namespace tessera
