// The handshake by which the ranks of a group find out whether they can share memory, and map it.
//
//   const auto met = shake_hands(store, {.rank = 1, .size = 4, .ranks = {0, 2, 4, 6}});
//   if (!met.backend) log_warning("{}", met.refusal);    // the same on every rank: use another back-end
//
// Ranks can share memory when they have the same boot id, process, network and user namespaces, and user as rank 0, and
// when every rank succeeds in mapping the memory (docs/design/shm.md). Thread-safe.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <string>
#include <vector>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace tessera::comm::shm {

inline constexpr int kMaxRanks = 128;

struct HandshakeOptions {
  int rank = 0;
  int size = 1;
  std::vector<int> ranks;       // global rank of each member
  bool oversubscribed = false;  // the ranks of the world on this host outnumber the cores that they may use
  std::string host = "";        // simulates several hosts in tests: ranks with different values are on different hosts
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

struct HandshakeResult {
  c10::intrusive_ptr<c10d::Backend> backend;  // null when refused
  std::string refusal;                        // the same on every rank
  std::vector<int> host_of;                   // index of each rank's host, from 0; empty unless on several hosts
};

// Finds out whether the ranks that share `store` can share memory. If they can, maps the memory and returns the
// back-end, else returns the reason. COLLECTIVE over these ranks; no other group may use `store`. Throws the errors of
// the store, and PeerFailed when a rank ends meanwhile.
HandshakeResult shake_hands(c10d::Store& store, const HandshakeOptions& options);

// Returns why this process cannot share memory; "" when it can.
std::string why_unavailable();

}  // namespace tessera::comm::shm
