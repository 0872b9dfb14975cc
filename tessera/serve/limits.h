// The limits of `tessera serve` for its clients. Each limit is a flag of the verb.
#pragma once

#include <cstdint>

namespace tessera::serve {

struct Limits {
  // When this many connections are open, each new connection takes the place of another one: a connection that does not
  // wait for an answer of the model is shut down. If all of them wait for an answer, the new connection is accepted in
  // addition. A connection is refused only when connections + max(connections, 64) are open.
  int64_t connections = 256;
  int64_t address_connections = 192;  // connections from one address that is not loopback; more are refused
  int64_t sequences = 64;             // sequences that one step of the engine computes
  int64_t queue = 128;                // sequences that wait for the engine; a request that exceeds this number gets 503
  int64_t choices = 64;               // per request: the number of prompts times "n"
  int64_t body_bytes = 4 << 20;       // of a request; a larger body gets 413
  int64_t header_bytes = 32 << 10;    // of a request; a larger header gets 431, or the connection is closed
  int64_t stops = 16;                 // number of strings in "stop"
  int64_t top_logprobs = 20;          // largest "top_logprobs", or "logprobs" of a completion
  double header_seconds = 5;          // time for the first header of a connection to arrive
  // Time for a body to arrive, for the next request on an idle connection, and for a client to read a reply.
  double read_seconds = 30;
  double request_seconds = 600;  // time from a request to its last token; longer answers are cut off
  double drain_seconds = 30;     // time after SIGTERM for the requests that are being answered
};

}  // namespace tessera::serve
