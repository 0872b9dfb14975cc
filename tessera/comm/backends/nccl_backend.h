// c10d's NCCL back-end, for groups of CUDA meshes. Builds whose libtorch has no NCCL compile no_nccl_backend.cc
// instead, whose functions report that NCCL is missing.
//
//   if (const auto reason = why_no_nccl(ranks_on_host); !reason.empty()) ...     // "this machine has no NVIDIA driver"
//   auto backend = make_nccl_backend(request);
//
// The returned back-end belongs to one rank; its abort() may be called from any thread.
#pragma once

#include <string>

#include "tessera/comm/backends/device_backends.h"

namespace tessera::comm {

// Returns what is missing on this host for NCCL (NCCL in libtorch, a driver, GPUs); "" when nothing is missing.
std::string why_no_nccl(int ranks_on_host);
// Makes this rank's NCCL back-end for the group that `request` describes. COLLECTIVE over the ranks that share
// request.store. Throws Error kConfig with the text of why_no_nccl() and a remedy when NCCL cannot be used.
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const DeviceBackendRequest& request);

}  // namespace tessera::comm
