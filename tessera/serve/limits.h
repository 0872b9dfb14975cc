// What `tessera serve` takes from clients at most; every one is a flag of the verb.
#pragma once

#include <cstdint>

namespace tessera::serve {

struct Limits {
  int64_t connections = 256;          // open at once, for which silent ones are shut; twice as many where none is
  int64_t address_connections = 192;  // of one address that is not loopback; more are refused
  int64_t sequences = 64;             // computed together
  int64_t queue = 128;                // requests that wait beside those; more get 503
  int64_t choices = 64;               // of a request: its prompts times "n"
  int64_t body_bytes = 4 << 20;       // of a request; more get 413
  int64_t header_bytes = 32 << 10;    // of a request, more get 431 or are cut off
  int64_t stops = 16;                 // strings of "stop"
  int64_t top_logprobs = 20;
  double header_seconds = 5;     // for the first header of a connection to arrive
  double read_seconds = 30;      // for a body to arrive, idle connections, and to take what is answered
  double request_seconds = 600;  // from a request to its last token; longer answers are cut off
  double drain_seconds = 30;     // after SIGTERM, for requests that are being answered
};

}  // namespace tessera::serve
