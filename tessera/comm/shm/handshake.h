// How the ranks of a group find out that they can share memory, and come to share it.
//
//   const auto met = shake_hands(store, {.rank = 1, .size = 4, .ranks = {0, 2, 4, 6}});
//   if (!met.backend) log_warning("{}", met.refusal);    // on every rank alike: use another back-end
//
// They can when boot id, process, network and user namespaces and user are those of rank 0, and when every rank gets
// the memory. docs/design/shm.md. Thread-safe.
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
  std::vector<int> ranks;  // global number of each member
  bool crowded = false;    // ranks (of the world, not of the group) may use fewer cores here than they are
  std::string host = "";   // tells apart what would be one host; for tests
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

struct Met {
  c10::intrusive_ptr<c10d::Backend> backend;  // null when refused
  std::string refusal;                        // the same on every rank
  std::vector<int> host_of;                   // of each rank, from 0, when they are on several hosts; else empty
};

// COLLECTIVE over the ranks that share `store` (which no other group uses). Throws what the store throws, and
// PeerFailed when a rank ends meanwhile.
Met shake_hands(c10d::Store& store, const HandshakeOptions& options);

// Why this process cannot share memory; "" when it can.
std::string why_unavailable();

}  // namespace tessera::comm::shm
