// When and how data-parallel gradients are reduced, alike for fully_shard (FSDP, HSDP) and replicate (DDP).
//
//   {
//     NoSync accumulate(*model);                  // gradients stay on this rank
//     for (auto& batch : first_batches) loss(batch).backward();
//   }
//   loss(last_batch).backward();                  // reduces what all of them left
//
// All ranks must switch alike. A module belongs to one rank.
#pragma once

#include <utility>
#include <vector>

#include "tessera/nn/module.h"

namespace tessera {

class DataParallelState;

// Switches of one module and, when recurse is set, all data-parallel modules below it.
// false: gradients accumulate on this rank and are reduced by the next backward with true. Error kShape when no
// module here is sharded or replicated.
void set_requires_gradient_sync(nn::Module& module, bool on, bool recurse = true);
// Divides gradients by `factor` instead of the data-parallel size (1: sums them), recursively.
void set_gradient_divide_factor(nn::Module& module, double factor);

// While it lives, no data-parallel module at or below `module` reduces gradients; then all are as before. The module
// must outlive it.
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
