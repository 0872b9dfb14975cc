// Switches for the reduction of data-parallel gradients, for fully_shard (FSDP, HSDP), wrap_fsdp1 and replicate (DDP).
//
//   {
//     NoSync accumulate(*model);                  // gradients stay on this rank
//     for (auto& batch : first_batches) loss(batch).backward();
//   }
//   loss(last_batch).backward();                  // reduces the accumulated gradients of all batches
//
// All ranks must use the same settings. A module belongs to one rank.
#pragma once

#include <utility>
#include <vector>

#include "tessera/nn/module.h"

namespace tessera {

class DataParallelState;

// Sets whether backward reduces gradients, for one module and, with recurse, all data-parallel modules below it. While
// reduction is off, gradients accumulate on this rank; the first backward after it is switched on reduces them. Error
// kShape if no module at or below `module` is sharded or replicated.
void set_requires_gradient_sync(nn::Module& module, bool on, bool recurse = true);
// Divides gradients by `factor` instead of the data-parallel world size (1: gradients are summed), for all
// data-parallel modules at or below `module`. Error kShape for a factor that is not positive, and if no module at or
// below `module` is sharded or replicated.
void set_gradient_divide_factor(nn::Module& module, double factor);

// While this object lives, no data-parallel module at or below `module` reduces gradients; its end restores the former
// settings. The module must outlive this object. Error kShape if no module at or below `module` is sharded or
// replicated.
class NoSync {
 public:
  explicit NoSync(nn::Module& module);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  std::vector<std::pair<DataParallelState*, bool>> before_;
};

}  // namespace tessera
