// A TCP socket that listens where those who are to come can reach it, and nowhere else.
//
//   const Listening here = listen_at("127.0.0.1", 0, Reach::kThisHost);
//   const Listening master = listen_at(master_address, 29500, Reach::kOtherHosts);
//
// Thread-safe.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/files/unique_fd.h"

namespace tessera {

enum class Reach { kThisHost, kOtherHosts };

struct Listening {
  UniqueFd socket;
  std::string address;  // numeric; where this host itself reaches it
  int port = 0;
  bool everywhere = false;  // on all interfaces
};

// Port 0: a free one. kThisHost: at the address of `host`, as it resolves here. kOtherHosts: the same if that is an
// address of this host and not loopback; else on all interfaces, since a name may lead elsewhere than for others:
// "localhost", Debian's 127.0.1.1 for the own name, the forwarded address of a service. 127.0.0.1 and ::1 themselves
// are meant as they stand. Error kConfig: no such name or not an address of this host; kComm: the port is taken.
Listening listen_at(const std::string& host, int port, Reach reach);

// This host's numeric address on the way to `host`, as the kernel would choose it; nothing is sent. "" when there is no
// way, or only loopback.
std::string address_towards(const std::string& host);

struct InterfaceAddress {
  std::string name, address;  // "eth0", numeric
};
// All that are up, link-local IPv6 addresses left out.
std::vector<InterfaceAddress> interfaces_of_this_host();
bool is_loopback(std::string_view address);  // a numeric one
// The addresses among them that are not loopback, each once.
std::vector<std::string> interface_addresses();

}  // namespace tessera
