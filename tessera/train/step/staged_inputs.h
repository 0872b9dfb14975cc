// Batches on their way to where a model computes. On an accelerator they go through pinned memory and are copied on a
// stream of their own: the next step's are there when the one before has been computed, and the host waits for neither.
//
//   StagedInputs staged(device, model.config());
//   model(staged.stage(micro_batches)[0]);      // what this thread launches comes behind the copies
//
// Tokens are checked while they are on the host: Error kConfig as check_text(). On the CPU the model reads the batches
// themselves. Belongs to one rank; no communication.
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "tessera/data/rows/batch.h"
#include "tessera/mesh/side_stream.h"
#include "tessera/models/decoder/causal_lm.h"

namespace tessera::train {

class StagedInputs {
 public:
  // `config` must outlive it.
  StagedInputs(c10::Device device, const ModelConfig& config)
      : device_(device), config_(config), copies_(device, /*high_priority=*/false) {}
  std::vector<ModelInputs> stage(const std::vector<data::Batch>& batches) const;

 private:
  at::Tensor there(const at::Tensor& tensor) const;

  c10::Device device_;
  const ModelConfig& config_;
  SideStream copies_;
};

}  // namespace tessera::train
