// Chooses and makes the back-end for the CPU tensors of a new group.
//
//   auto backend = choose_backend(store, {.requested = "auto", .group = "dp", .rank = 0, .size = 2, .ranks = {0, 1}});
//
// "auto": shared memory when all ranks of the group can share it. On several hosts with equal numbers of ranks, at
// least two: shared memory inside each host and Gloo between the hosts (hierarchical_backend.h). Otherwise Gloo; when
// the ranks are on one host, a warning says why. "shm": shared memory, or Error kConfig with the reason. "gloo": Gloo.
// "nccl": as "auto" for CPU tensors.
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
  std::string requested = "auto";
  std::string group;
  int rank = 0;  // position in the group
  int size = 1;
  std::vector<int> ranks;       // global ranks
  bool oversubscribed = false;  // the ranks on this host outnumber the cores that they may use
  bool one_host = true;         // the whole world is on this host
  std::string other_host = "";  // address of another host, when there are several; "": not known
  std::string host = "";        // simulates several hosts in tests: ranks with different values are on different hosts
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
};

bool is_backend(std::string_view name);  // "auto", "shm", "gloo", "nccl"

// Chooses and makes this rank's back-end, as described above. COLLECTIVE over the ranks that share `store`; no other
// group may use this store. Throws Error kConfig for "shm" when the ranks cannot share memory, and libtorch's
// exceptions.
c10::intrusive_ptr<c10d::Backend> choose_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const BackendRequest& request);

}  // namespace tessera::comm
