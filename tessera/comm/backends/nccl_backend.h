// c10d's NCCL back-end, for groups of CUDA meshes. A real file in builds whose libtorch has NCCL, else one that says
// why not.
//
//   if (const auto reason = why_no_nccl(ranks_on_host); !reason.empty()) ...     // "this machine has no NVIDIA driver"
//   auto backend = make_nccl_backend(request);
//
// The result is used by one rank; abort() may come from any thread.
#pragma once

#include <string>

#include "tessera/comm/backends/device_backends.h"

namespace tessera::comm {

// What is missing on this host: NCCL in libtorch, a driver, GPUs. Empty: nothing.
std::string why_no_nccl(int ranks_on_host);
// COLLECTIVE over the ranks that share the request's store. Error kConfig: why_no_nccl(), and the remedy.
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const DeviceBackendRequest& request);

}  // namespace tessera::comm
