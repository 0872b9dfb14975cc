// The key-value store of a run, served to all its ranks by the process of rank 0. Internal to comm.
//
//   auto server = std::make_shared<HubServer>(listen_at(host, port, reach).socket, {.token = t, .run = "nightly",
//   ...});
//
// A client with the wrong token is refused and receives nothing about the run. A client of another run is refused and
// receives the name of this run. In both cases the connection ends and rank 0 logs a warning. The memory for clients
// that have not sent the token is bounded in all. When descriptors run out, the server accepts no connection for one
// second and continues. One thread serves all connections with epoll, so a request costs the same among 8,000
// connections as among 8. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "tessera/base/files/unique_fd.h"

namespace tessera::comm {

struct HubIdentity {
  std::string token;  // the secret of the run; empty: any client may connect
  std::string run;    // name of the run; empty: matches any run
  std::string who;    // for messages, e.g. "rank 3 (process 77 on node4)"
};

struct HubFigures {
  int64_t connections = 0, requests = 0, keys = 0, bytes = 0;  // bytes: of all keys and values
  int64_t unknown_bytes = 0;  // buffered input of connections that have not sent the token
};

class HubServer {
 public:
  // Error kIo when the system gives no descriptors.
  HubServer(UniqueFd listener, HubIdentity identity);
  ~HubServer();
  HubServer(const HubServer&) = delete;
  HubServer& operator=(const HubServer&) = delete;
  HubFigures figures() const;

 private:
  class Loop;
  std::unique_ptr<Loop> loop_;
};

}  // namespace tessera::comm
