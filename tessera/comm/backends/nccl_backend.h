// c10d's NCCL back-end, for groups of CUDA meshes. A real file in builds whose libtorch has NCCL, else one that says
// why not.
//
//   if (const auto reason = why_no_nccl(ranks_on_host); !reason.empty()) ...     // "this machine has no NVIDIA driver"
//   auto backend = make_nccl_backend(store, {.rank = 0, .size = 2, .device = 0, .ranks_on_host = 2, .timeout = 5min});
//
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

struct NcclOptions {
  int rank = 0;  // in the group
  int size = 1;
  int device = 0;         // of this rank, among those that it sees
  int ranks_on_host = 1;  // of the world; each needs a device of its own
  std::chrono::milliseconds timeout = std::chrono::minutes(5);
  bool high_priority_streams = false;
  // Of make_nccl_backend: all its ranks make a group now, each rank that of its color. Rank r of a group is the one
  // that says so.
  c10::intrusive_ptr<c10d::Backend> split_from = {};
  int split_color = 0;
};

// GPUs that this process sees.
int visible_gpus();
// What is missing on this host: NCCL in libtorch, a driver, GPUs. Empty: nothing.
std::string why_no_nccl(int ranks_on_host);
// COLLECTIVE over the ranks that share `store` (which no other group uses). Error kConfig: why_no_nccl(), and the
// remedy.
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(c10::intrusive_ptr<c10d::Store> store, const NcclOptions& options);

}  // namespace tessera::comm
