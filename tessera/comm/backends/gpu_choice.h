// Which GPU a rank computes on, and whether there are enough. No CUDA in it.
//
//   const int device = gpu_of(info.local_rank, visible);          // 0 where each rank sees one GPU, its own
//   if (const auto reason = why_too_few_gpus(visible, info.local_size, own_list); !reason.empty()) ...
//
// A launcher either shows all GPUs of a host to all its ranks (torchrun, ours) or to each its own
// (Slurm's --gpus-per-task=1). Thread-safe.
#pragma once

#include <string>

namespace tessera::comm {

// Number of the device among the `visible` ones.
int gpu_of(int local_rank, int visible);

// Empty: nothing is missing. `own_list`: CUDA_VISIBLE_DEVICES is set, so that one visible GPU may be this rank's own;
// two ranks that were given the same one are refused by NCCL, which names it.
std::string why_too_few_gpus(int visible, int ranks_on_host, bool own_list);

}  // namespace tessera::comm
