// Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685): a Linear whose weight stays as it is, and beside it two
// small matrices that learn. y = W x + b + scaling B A dropout(x). As PEFT's lora.Linear.
//
//   parent.replace_child("q_proj", std::make_shared<nn::LoraLinear>(*parent.q_proj, nn::LoraSettings{.rank = 8}));
//
// Adapters are children of the Linear that they adapt, lora_A, lora_B and, of DoRA, lora_magnitude_vector: their names
// are PEFT's. What makes a Linear parallel makes them parallel, too: models/adapters/adapters.h says how to use them.
// Ownership and threads as nn::Module.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/kernels/attention/context_layout.h"
#include "tessera/nn/layers.h"

namespace tessera::nn {

struct PackedWeight;

// What a module derives from whose parameters belong to an adapter, not to the model.
struct AdapterPart {
  virtual ~AdapterPart() = default;
};

// Which inputs are dropped: a function of the seed, the layer, and the place of the token in all rows that were trained
// on, so that masks do not depend on the layout or on micro-batches, and a recomputed forward has the same ones. Shared
// by all adapters of a model.
struct LoraDropout {
  double probability = 0;
  uint64_t seed = 0;
  int64_t calls = 0;  // of the model in training, so far; of stages of it one for each micro-batch
  // The place of the first row of the call of that number (from 0) in all rows of the run. None: rows follow one
  // another on this rank.
  std::function<int64_t(int64_t call)> row_of_call = {};
  // How the tokens of a row lie over ranks, and this one's number among them. None: rows are whole.
  std::optional<kernels::ContextLayout> context = {};
  int64_t context_rank = 0;
  int64_t first_row = 0, next_row = 0;     // of the call under way, and behind it
  std::vector<int64_t> first_row_of = {};  // each micro-batch of the step under way; empty: no step is

  // A call of the model with so many rows begins. Within a step its micro-batch says where they are.
  void begin_call(int64_t rows);
  // A step begins, whose micro-batches, with so many rows, go forward and backward in any order, stage by stage; ends.
  void begin_step(const std::vector<int64_t>& rows);
  void end_step() { first_row_of.clear(); }
  // What runs next is of this micro-batch of the step.
  void enter(int64_t micro_batch) { first_row = first_row_of.at(static_cast<size_t>(micro_batch)); }
};

struct LoraSettings {
  int64_t rank = 8;
  double alpha = 16;
  bool rslora = false;  // scaling alpha / sqrt(rank) in place of alpha / rank
  bool dora = false;    // the norm of each row of the weight is learnt apart (https://arxiv.org/abs/2402.09353)
  std::shared_ptr<LoraDropout> dropout = {};       // none: nothing is dropped
  std::string path = {};                           // of the layer in its model, which draws its dropout
  c10::ScalarType dtype = c10::ScalarType::Float;  // of the adapter
};

// weight [out, in]
struct LoraMatrix : Callable<LoraMatrix>, AdapterPart {
  at::Tensor weight;
  LoraMatrix(int64_t in, int64_t out, const ParameterOptions& options);
  at::Tensor forward(const at::Tensor& x);
};

// weight [out]
struct LoraMagnitude : Module, AdapterPart {
  at::Tensor weight;
  LoraMagnitude(int64_t out, const ParameterOptions& options);
};

// Weight and bias are those of the Linear that it takes the place of, frozen; of a QuantizedLinear the packed weight,
// and `weight` is not defined. The adapter's values are uninitialised. Error kConfig: rank below 1, a Linear that has
// hooks already.
struct LoraLinear : Linear {
  std::shared_ptr<LoraMatrix> lora_A, lora_B;            // [rank, in], [out, rank]
  std::shared_ptr<LoraMagnitude> lora_magnitude_vector;  // of DoRA, else null
  std::shared_ptr<PackedWeight> packed;                  // null: `weight` is the base
  LoraLinear(Linear& former, const LoraSettings& settings);
  at::Tensor forward(const at::Tensor& x) override;

  double scaling() const { return scaling_; }
  // [out, in]; of a packed weight decoded, float32. Whole but for tensor parallelism.
  at::Tensor base_weight() const;
  const LoraSettings& settings() const { return settings_; }
  // weight + scaling B A, and with DoRA its rows brought to their magnitudes, of whole plain tensors; magnitude
  // undefined: none. In the dtype of `weight`.
  static at::Tensor merged(const at::Tensor& weight, const at::Tensor& a, const at::Tensor& b,
                           const at::Tensor& magnitude, double scaling);

 private:
  at::Tensor product(const at::Tensor& x, const at::Tensor& bias_of) const;
  at::Tensor dropped(const at::Tensor& x) const;
  at::Tensor row_scale() const;
  LoraSettings settings_;
  double scaling_;
  uint64_t stream_;
};

}  // namespace tessera::nn
