// Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685): a Linear with a frozen weight and two small trained
// matrices. y = W x + b + scaling B A dropout(x), as PEFT's lora.Linear.
//
//   parent.replace_child("q_proj", std::make_shared<nn::LoraLinear>(*parent.q_proj, nn::LoraSettings{.rank = 8}));
//
// Adapters are children of their Linear with PEFT's names: lora_A, lora_B and, for DoRA, lora_magnitude_vector. The
// functions that parallelize a Linear parallelize them, too (models/adapters/adapters.h). Ownership and thread rules
// are those of nn::Module.
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

// Base class of modules whose parameters belong to an adapter and not to the base model.
struct AdapterModule {
  virtual ~AdapterModule() = default;
};

// The dropout of adapter inputs. A mask is a function of the seed, the layer, and the token's row (counted over the
// whole run) and position. So masks do not depend on the parallel layout or the micro-batch size, and a recomputed
// forward has the same masks. All adapters of a model share one object.
struct LoraDropout {
  double probability = 0;
  uint64_t seed = 0;
  int64_t calls = 0;  // number of training calls of the model so far; pipeline stages count one per micro-batch
  // Returns the index, among all rows of the run, of the first row of forward call number `call` (counted from 0).
  // Null: the rows of a call follow the rows of this rank's previous call.
  std::function<int64_t(int64_t call)> row_of_call = {};
  // How the tokens of a row are sharded over context-parallel ranks, and this rank's index. Nullopt: rows are not
  // sharded.
  std::optional<kernels::ContextLayout> context = {};
  int64_t context_rank = 0;
  int64_t first_row = 0, next_row = 0;     // the current call's first row, and the first row after the call
  std::vector<int64_t> first_row_of = {};  // per micro-batch of the current step; empty: no step is under way

  // Must be called before each training forward of the model, with the number of rows of its batch. Between
  // begin_step() and end_step() begin_call() does nothing: begin_step() has counted the rows of all micro-batches
  // already, and select_micro_batch() sets first_row.
  void begin_call(int64_t rows);
  // For pipeline stages: begins a step in which several micro-batches run forward and backward in any order. `rows` has
  // the number of rows of each micro-batch. end_step() ends the step.
  void begin_step(const std::vector<int64_t>& rows);
  void end_step() { first_row_of.clear(); }
  // Sets first_row to the first row of this micro-batch. Must be called between begin_step() and end_step(), before
  // each forward and each backward of a micro-batch.
  void select_micro_batch(int64_t micro_batch) { first_row = first_row_of.at(static_cast<size_t>(micro_batch)); }
};

struct LoraSettings {
  int64_t rank = 8;
  double alpha = 16;
  bool rslora = false;  // scaling alpha / sqrt(rank) in place of alpha / rank
  bool dora = false;  // DoRA (https://arxiv.org/abs/2402.09353): the norm of each weight row is a parameter of its own
  std::shared_ptr<LoraDropout> dropout = {};       // null: no dropout
  std::string path = {};                           // FQN of the layer; selects its random numbers
  c10::ScalarType dtype = c10::ScalarType::Float;  // of the adapter's parameters
};

// weight [out, in]
struct LoraMatrix : Callable<LoraMatrix>, AdapterModule {
  at::Tensor weight;
  LoraMatrix(int64_t in, int64_t out, const ParameterOptions& options);
  at::Tensor forward(const at::Tensor& x);
};

// weight [out]
struct LoraMagnitude : Module, AdapterModule {
  at::Tensor weight;
  LoraMagnitude(int64_t out, const ParameterOptions& options);
};

// A Linear with an adapter. It takes over the weight and bias of the Linear that it replaces (`former`) and freezes
// them. From a QuantizedLinear it takes over the packed weight, and `weight` is undefined. The adapter's values are
// uninitialised. Error kConfig: rank below 1, or a Linear that has hooks or a DTensor weight.
struct LoraLinear : Linear {
  std::shared_ptr<LoraMatrix> lora_A, lora_B;            // [rank, in], [out, rank]
  std::shared_ptr<LoraMagnitude> lora_magnitude_vector;  // null without DoRA
  std::shared_ptr<PackedWeight> packed;                  // null: `weight` is the base weight
  LoraLinear(Linear& former, const LoraSettings& settings);
  at::Tensor forward(const at::Tensor& x) override;

  double scaling() const { return scaling_; }
  // Returns the base weight [out, in]; a packed weight is decoded to float32. Under tensor parallelism it is a DTensor,
  // else a plain tensor.
  at::Tensor base_weight() const;
  const LoraSettings& settings() const { return settings_; }
  // Returns weight + scaling * B A, in the dtype of `weight`. The arguments are unsharded plain tensors. With a defined
  // `magnitude` (DoRA) each row is then scaled so that its norm is its magnitude.
  static at::Tensor merged(const at::Tensor& weight, const at::Tensor& a, const at::Tensor& b,
                           const at::Tensor& magnitude, double scaling);

 private:
  at::Tensor product(const at::Tensor& x, const at::Tensor& bias_of) const;
  at::Tensor apply_dropout(const at::Tensor& x) const;
  at::Tensor row_scale() const;
  LoraSettings settings_;
  double scaling_;
  uint64_t stream_;
};

}  // namespace tessera::nn
