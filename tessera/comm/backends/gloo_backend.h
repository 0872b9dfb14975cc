// c10d's Gloo back-end, bound to one network interface, with an abort() that ends the collectives under way.
//
//   auto backend = make_gloo_backend(store, {.rank = 0, .size = 2, .loopback = true, .timeout = 5min});
//
// All ranks connect to all others when the group is made. Gloo can also connect two ranks lazily, at their
// first message, but a group that connects lazily cannot be destroyed safely: its event loop is stopped before
// its connections are closed, and then spins endlessly on a connection whose peer leaves in between (after 1 of
// 400 killed ranks, a survivor never ended). Unless all ranks are on one host (GlooOptions::loopback), the two
// ranks of each connection authenticate each other when the group is made: each rank sends the other a word
// that is derived from a secret in the store. The returned back-end belongs to one rank; its abort() may be
// called from any thread.
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
  bool loopback = true;         // all ranks are on this host: bind to 127.0.0.1
  std::string other_host = "";  // otherwise bind to own_address(other_host) of interface_choice.h
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

// Makes this rank's back-end and connects it to all other ranks. COLLECTIVE over the ranks that share `store`; no other
// group may use this store. Throws libtorch's errors, and Error kComm: another process has connected in place of a rank
// (the message names the rank), the ranks could not authenticate one another, or /proc is not mounted.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(c10::intrusive_ptr<c10d::Store> store, const GlooOptions& options);

}  // namespace tessera::comm
