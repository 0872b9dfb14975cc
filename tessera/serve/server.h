// The HTTP server, based on libmicrohttpd: /v1/chat/completions, /v1/completions, /v1/models and /health.
//
//   Server server(served, scheduler, {.listening = listen_at("127.0.0.1", 8000, ListenScope::kThisHost), .token = ""});
//   ... until a signal comes ...
//   server.drain();                    // accepts no new requests and completes the current ones
//
// Each connection has a thread. Without a token the server answers only requests whose Host header is localhost or the
// address it listens at, and bodies must be application/json; so a web page in a browser cannot use the server.
// Thread-safe.
#pragma once

#include <memory>
#include <string>

#include "tessera/base/machine/listen.h"
#include "tessera/serve/requests.h"
#include "tessera/serve/scheduler.h"

namespace tessera::serve {

struct ServerOptions {
  ListeningSocket listening;
  std::string token{};  // clients must send it as a bearer token; empty: no token is needed
};

class Server {
 public:
  // `served` and `scheduler` must outlive the server. Error kInternal when libmicrohttpd does not start.
  Server(const ServedModel& served, Scheduler& scheduler, ServerOptions options);
  ~Server();  // closes all connections, without waiting for their answers
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Closes the listening socket and waits for the requests that are being answered. True when all of them were
  // completed within limits.drain_seconds.
  bool drain();

 private:
  struct ServerState;
  std::unique_ptr<ServerState> state_;
};

}  // namespace tessera::serve
