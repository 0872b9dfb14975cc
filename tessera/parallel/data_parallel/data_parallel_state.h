// What fully_shard and replicate have in common as attachments of a module.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "tessera/nn/module.h"

namespace tessera {

class DataParallelState : public nn::Module::Attachment {
 public:
  virtual bool synchronizes() const = 0;
  virtual void set_synchronize(bool on) = 0;
  virtual void set_divide(double factor) = 0;
};

// Those of the module and all below it, outermost first.
std::vector<DataParallelState*> data_parallel_states(nn::Module& module);

void cast_floating(const nn::TensorRefs& tensors, c10::ScalarType dtype);

// For gradients in float16: what they are divided by before they are summed, so that neither the sum nor the quotient
// leaves the range (FSDP2's rule: the largest power of two below about the square root of the divisor).
double fp16_pre_divisor(double divide);

}  // namespace tessera
