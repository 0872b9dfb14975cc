// Linear layers that multiply in float8 with one scale per tensor, as in torchao's dynamic float8 training: inputs and
// weights in float8_e4m3fn, gradients of outputs in float8_e5m2, sums in float32. Parameters, inputs and outputs keep
// their dtypes.
//
//   const auto steps = nn::convert_to_float8(*model);              // before it is parallelized
//   flags.on_change([steps](const train::MicrobatchFlags& now) {   // tessera/train/nemo/accumulation.h
//     if (now.first_microbatch() == true && !now.optim_step()) steps->begin_float8_step();
//   });
//
// In training a weight is converted to float8 once per step, at its first use after begin_float8_step(), and cached for
// the other micro-batches and for recomputed forwards. Without begin_float8_step(), and outside training, it is
// converted at each use. Code that changes a parameter must call begin_float8_step(). A cached weight takes one byte
// per element of the unsharded weight, also under fully_shard. Products use float8 kernels if the device has them
// (kernels/linear/float8.h); on other devices the float8 values are multiplied in float32. Ranks that run as threads of
// one process must not share these layers.
#pragma once

#include <cstdint>
#include <memory>

#include "tessera/kernels/linear/float8.h"
#include "tessera/nn/layers.h"

namespace tessera::nn {

// The step counter that all float8 layers of a model share.
struct Float8StepCounter {
  int64_t number = 0;              // number of the current step; 0: before the first step; nothing is cached
  int64_t weight_conversions = 0;  // conversions so far, over all weights
  void begin_float8_step() { ++number; }
};

// Replaces a Linear and takes over its parameters.
struct Float8Linear : Linear {
  Float8Linear(Linear& former, std::shared_ptr<Float8StepCounter> steps);
  // Error kConfig for DTensor weights: float8 with tensor parallelism is not supported in this version.
  at::Tensor forward(const at::Tensor& x) override;
  const std::shared_ptr<Float8StepCounter>& steps() const { return steps_; }

 private:
  const kernels::Float8Tensor& converted_weight();
  std::shared_ptr<Float8StepCounter> steps_;
  kernels::Float8Tensor cached_weight_;
  int64_t cached_in_step_ = 0;  // the step in which cached_weight_ was converted; 0: cached_weight_ is empty
};

// Replaces each Linear below `root` by a Float8Linear; classes derived from Linear (adapters) stay unchanged. Error
// kConfig for modules that already have hooks.
std::shared_ptr<Float8StepCounter> convert_to_float8(Module& root);
// Returns the step counter that all Float8Linears below `root` share; null if `root` has no Float8Linear.
std::shared_ptr<Float8StepCounter> float8_steps(Module& root);

}  // namespace tessera::nn
