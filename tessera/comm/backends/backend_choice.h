// Which back-end carries the collectives of a new group.
//
//   auto backend = choose_backend(store, {.wanted = "auto", .group = "dp", .rank = 0, .size = 2, .ranks = {0, 1}});
//
// "auto": shared memory when all ranks of the group can share it; shared memory inside each host and Gloo between them
// when there are several hosts with equally many ranks (mixed_backend.h); else Gloo, and one line says why when the
// ranks are on one host. "shm": shared memory, or Error kConfig with the reason. "gloo": Gloo. "nccl": as "auto", for
// what lies on the CPU.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace tessera::comm {

struct BackendRequest {
  std::string wanted = "auto";
  std::string group;
  int rank = 0;  // in the group
  int size = 1;
  std::vector<int> ranks;       // global numbers
  bool crowded = false;         // the ranks of this host may use fewer cores than they are
  bool one_host = true;         // the whole world is on this host
  std::string other_host = "";  // an address of another host, when there are several; "": not known
  std::string host = "";        // tells apart what would be one host; for tests
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

bool is_backend(std::string_view name);  // "auto", "shm", "gloo", "nccl"

// COLLECTIVE over the ranks that share `store` (which no other group uses). Throws libtorch's errors too.
c10::intrusive_ptr<c10d::Backend> choose_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const BackendRequest& request);

}  // namespace tessera::comm
