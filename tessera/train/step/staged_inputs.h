// Copies batches to the device of a model. On an accelerator the copies go through pinned memory and run on a separate
// stream: they overlap with the computation of the previous step, and the host does not wait for them. On the CPU the
// model reads the batches in place.
//
//   StagedInputs staged(device, model.config());
//   model(staged.stage(micro_batches)[0]);      // kernels that this thread launches now run after the copies
//
// Belongs to one rank; no communication.
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "tessera/data/rows/batch.h"
#include "tessera/mesh/device_stream.h"
#include "tessera/models/decoder/causal_lm.h"

namespace tessera::train {

class StagedInputs {
 public:
  // `config` must outlive the object.
  StagedInputs(c10::Device device, const ModelConfig& config)
      : device_(device), config_(config), copy_stream_(device, /*high_priority=*/false) {}
  // The inputs of one forward per batch. Tokens are checked while they are on the host: Error kConfig as
  // check_no_image_tokens().
  std::vector<ModelInputs> stage(const std::vector<data::Batch>& batches) const;

 private:
  at::Tensor copy_to_device(const at::Tensor& tensor) const;

  c10::Device device_;
  const ModelConfig& config_;
  DeviceStream copy_stream_;
};

}  // namespace tessera::train
