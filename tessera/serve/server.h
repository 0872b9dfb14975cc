// HTTP over libmicrohttpd: /v1/chat/completions, /v1/completions, /v1/models and /health.
//
//   Server server(served, scheduler, {.listening = listen_at("127.0.0.1", 8000, Reach::kThisHost), .token = ""});
//   ... until a signal comes ...
//   server.drain();                    // no new requests; those that are being answered come to their end
//
// A thread a connection. Without a token only requests that name this host as it is called here are answered, and
// bodies must be application/json, so that no page in a browser can reach it. Thread-safe.
#pragma once

#include <memory>
#include <string>

#include "tessera/base/machine/listen.h"
#include "tessera/serve/requests.h"
#include "tessera/serve/scheduler.h"

namespace tessera::serve {

struct ServerOptions {
  Listening listening;
  std::string token{};  // that clients must bring; empty: none
};

class Server {
 public:
  // Both must outlive it. Error kInternal where the HTTP library refuses.
  Server(const Served& served, Scheduler& scheduler, ServerOptions options);
  ~Server();  // cuts off what is left
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // True when all requests came to their end in limits.drain_seconds.
  bool drain();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera::serve
