// c10d's Gloo back-end, bound to one network interface, whose abort() really breaks off what is in flight.
//
//   auto backend = make_gloo_backend(store, {.rank = 0, .size = 2, .loopback = true, .timeout = 5min});
//
// All ranks connect to all when it is made. Gloo can also connect two ranks when one first sends to the other, but such
// a group cannot be destroyed safely: its loop is told to stop before its connections are closed, and for ever spins on
// one whose peer leaves in between (1 of 400 killed ranks left a survivor that never ended).
// Unless all are on one host, each connection then says, in both directions, a word that only
// who reads the store can know.
// The result is used by one rank; abort() may come from any thread.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <string>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace tessera::comm {

struct GlooOptions {
  int rank = 0;
  int size = 1;
  bool loopback = true;         // all ranks on this host: bind to 127.0.0.1
  std::string other_host = "";  // else to own_address() towards that host (interface_choice.h)
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

// COLLECTIVE over the ranks that share `store` (which no other group uses). Throws libtorch's errors,
// and kComm that names a rank where somebody else has connected in its place.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(c10::intrusive_ptr<c10d::Store> store, const GlooOptions& options);

}  // namespace tessera::comm
