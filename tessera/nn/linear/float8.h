// Linears that multiply in float8, with a scale for each tensor, as torchao's dynamic float8 training: inputs and
// weights as float8_e4m3fn, gradients of outputs as float8_e5m2, sums in float32. Parameters, inputs and outputs stay
// as they were.
//
//   const auto steps = nn::convert_to_float8(*model);              // before it is parallelized
//   flags.on_change([steps](const train::MicrobatchFlags& now) {   // tessera/train/nemo/accumulation.h
//     if (now.first_microbatch() == true && !now.optim_step()) steps->begin();
//   });
//
// In training a weight is converted once a step, at its first use after begin(), and kept for the other micro-batches
// and for recomputed forwards; without begin(), and outside training, at each use. Whoever changes a parameter calls
// begin(). What is kept is a byte an element, of whole weights under fully_shard. Products are the hardware's where it
// has them (kernels/linear/float8.h), elsewhere of the same values in float32. Belongs to one rank.
#pragma once

#include <cstdint>
#include <memory>

#include "tessera/kernels/linear/float8.h"
#include "tessera/nn/layers.h"

namespace tessera::nn {

// Shared by the float8 Linears of a model.
struct Float8Steps {
  int64_t number = 0;              // of the step under way; 0: before the first, nothing is kept
  int64_t weight_conversions = 0;  // so far, of all weights
  void begin() { ++number; }
};

// In the place of a Linear, whose parameters it shows.
struct Float8Linear : Linear {
  Float8Linear(Linear& former, std::shared_ptr<Float8Steps> steps);
  // Error kConfig for weights that are DTensors: float8 and tensor parallelism do not go together in this version.
  at::Tensor forward(const at::Tensor& x) override;
  const std::shared_ptr<Float8Steps>& steps() const { return steps_; }

 private:
  const kernels::Float8Tensor& converted_weight();
  std::shared_ptr<Float8Steps> steps_;
  kernels::Float8Tensor kept_;
  int64_t kept_in_ = 0;  // the step; 0: nothing is kept
};

// Puts a Float8Linear in place of each Linear below `root` that is one exactly, adapted ones left alone. Error kConfig
// for modules that have hooks already.
std::shared_ptr<Float8Steps> convert_to_float8(Module& root);
// Of the Float8Linears that are there; null: none are.
std::shared_ptr<Float8Steps> float8_steps(Module& root);

}  // namespace tessera::nn
