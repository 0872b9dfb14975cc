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

// The dropout of adapter inputs. A mask is a function of the seed, the layer, and the position of the token among all
// rows of the run. So masks do not depend on the layout or on micro-batches, and a recomputed forward has the same
// masks. All adapters of a model share the object.
struct LoraDropout {
  double probability = 0;
  uint64_t seed = 0;
  int64_t calls = 0;  // number of training calls of the model so far; pipeline stages count one per micro-batch
  // The index, among all rows of the run, of the first row of call number `call` (from 0). Null: the rows of the calls
  // on this rank follow one another.
  std::function<int64_t(int64_t call)> row_of_call = {};
  // How the tokens of a row are sharded over context-parallel ranks, and this rank's index. Nullopt: rows are whole.
  std::optional<kernels::ContextLayout> context = {};
  int64_t context_rank = 0;
  int64_t first_row = 0, next_row = 0;     // the current call's first row, and the first row after the call
  std::vector<int64_t> first_row_of = {};  // per micro-batch of the current step; empty: no step is under way

  // Begins a call of the model with `rows` rows. Within a step it does nothing, because select_micro_batch() sets the
  // rows.
  void begin_call(int64_t rows);
  // Begins a step whose micro-batches have these numbers of rows and run forward and backward in any order, stage by
  // stage. end_step() ends it.
  void begin_step(const std::vector<int64_t>& rows);
  void end_step() { first_row_of.clear(); }
  // Selects the micro-batch of the step that runs next.
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

// Takes over weight and bias of the Linear that it replaces, frozen. From a QuantizedLinear it takes the packed weight,
// and `weight` is undefined. The adapter's values are uninitialised. Error kConfig: rank below 1, or a Linear that
// already has hooks.
struct LoraLinear : Linear {
  std::shared_ptr<LoraMatrix> lora_A, lora_B;            // [rank, in], [out, rank]
  std::shared_ptr<LoraMagnitude> lora_magnitude_vector;  // null without DoRA
  std::shared_ptr<PackedWeight> packed;                  // null: `weight` is the base weight
  LoraLinear(Linear& former, const LoraSettings& settings);
  at::Tensor forward(const at::Tensor& x) override;

  double scaling() const { return scaling_; }
  // The base weight [out, in]; a packed weight is decoded to float32. Under tensor parallelism a DTensor, else whole.
  at::Tensor base_weight() const;
  const LoraSettings& settings() const { return settings_; }
  // weight + scaling B A, for whole plain tensors, in the dtype of `weight`. With a defined `magnitude` (DoRA) each row
  // is scaled to its magnitude.
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
