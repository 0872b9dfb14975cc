// The key-value store of a run, served to all its ranks by the process of rank 0. Internal to comm.
//
//   auto server = std::make_shared<HubServer>(listen_at(host, port, reach).socket, {.token = t, .run = "nightly",
//   ...});
//
// Who does not say the token first gets that for an answer and hears nothing of the run, who names another run hears
// which this is; both are let go, and rank 0 warns of them. What strangers can make it hold is bounded in all, and when
// descriptors run out it lets nobody in for a second, and goes on.
// One thread serves all connections with epoll, so that a request costs the same among 8,000 as among 8. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "tessera/base/files/unique_fd.h"

namespace tessera::comm {

struct HubIdentity {
  std::string token;  // empty: anyone may come
  std::string run;    // empty: of any
  std::string who;    // "rank 3 (process 77 on node4)"
};

struct HubFigures {
  int64_t connections = 0, requests = 0, keys = 0, bytes = 0;  // of keys and values
  int64_t unknown_bytes = 0;  // that are held of connections that have not said the token
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
