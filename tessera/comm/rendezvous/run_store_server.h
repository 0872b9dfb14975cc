// The key-value store of a run, served to all its ranks by the process of rank 0. Internal to comm.
//
//   const RunIdentity identity{.token = token, .run = "nightly", .who = "rank 0"};
//   auto server = std::make_shared<RunStoreServer>(listen_at(host, port, reach).socket, identity);
//
// A client with the wrong token is refused and receives nothing about the run. A client of another run is refused and
// receives the name of this run. In both cases the connection ends and rank 0 logs a warning. The memory that all
// clients without the token use together is bounded. When descriptors run out, the server closes the connections that
// have not sent the token, accepts no connection for up to one second, and continues. One thread serves all connections
// with epoll, so a request costs the same among 8,000 connections as among 8. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "tessera/base/files/unique_fd.h"

namespace tessera::comm {

struct RunIdentity {
  std::string token;  // the secret of the run; empty: any client may connect
  std::string run;    // name of the run; empty: matches any run
  std::string who;    // for messages, e.g. "rank 3 (process 77 on node4)"
};

struct RunStoreStatistics {
  int64_t connections = 0, requests = 0, keys = 0, bytes = 0;  // bytes: of all keys and values
  int64_t unauthenticated_bytes = 0;  // buffered input of connections that have not sent the token
};

class RunStoreServer {
 public:
  // Starts the thread that serves the store to the clients of `listener`. Error kIo when the system gives no file
  // descriptors.
  RunStoreServer(UniqueFd listener, RunIdentity identity);
  ~RunStoreServer();
  RunStoreServer(const RunStoreServer&) = delete;
  RunStoreServer& operator=(const RunStoreServer&) = delete;
  RunStoreStatistics statistics() const;

 private:
  class ServerLoop;
  std::unique_ptr<ServerLoop> loop_;
};

}  // namespace tessera::comm
