// Low-rank adapters of a language model (LoRA, DoRA), in PEFT's format: adapter_config.json and
// adapter_model.safetensors. The older adapter_model.bin can be read too.
//
//   auto model = make_model(config, {.device = at::kMeta});
//   add_adapters(*model, {.rank = 8, .target_modules = {"q_proj", "v_proj"}});   // freezes all other parameters
//   parallelize_model(*model, options); to_empty(*model, device);               // optional
//   load_pretrained(*model, dir);                                                // the base weights
//   init_adapters(*model, seed);                                                 // or load_adapters(*model, folder)
//   ...
//   save_adapters(*model, "out", {.base = dir});
//   save_pretrained(*model, "merged", dir, {.merge_adapters = true});            // weights.h
//
// Ranks that run as threads of one process must not share a model.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/models/decoder/causal_lm.h"
#include "tessera/nn/linear/lora.h"

namespace tessera {

// The syntax of the entries of target_modules.
enum class TargetSyntax {
  // An entry of only letters, digits, '_' and '.' is the path of a Linear or the last parts of its path. "all-linear"
  // selects all Linears. Any other entry is a regular expression for the whole path.
  kRecipe,
  kPeftNames,    // a list in PEFT's file: names only, some of which may belong to other models
  kPeftPattern,  // a text in PEFT's file: one regular expression of the whole path, even when it looks like a name
};

struct AdapterConfig {
  int64_t rank = 8;
  double alpha = 16;
  double dropout = 0;
  bool rslora = false;
  bool dora = false;
  std::vector<std::string> target_modules = {"all-linear"};
  TargetSyntax target_syntax = TargetSyntax::kRecipe;
};

// Reads adapter_config.json of a folder that PEFT saved. Errors: kFormat for a file that is not valid; kConfig for
// settings that this version does not support (a peft_type other than LORA, rank_pattern, modules_to_save, trained
// biases, initialisations that change the base weights).
AdapterConfig read_adapter_config(const std::filesystem::path& folder);
// Returns the path of adapter_model.safetensors in a folder that PEFT saved, or of adapter_model.bin when the folder
// has no adapter_model.safetensors. Error kIo when the folder has neither file.
std::filesystem::path adapter_weights_file(const std::filesystem::path& folder);

// Replaces every Linear that an entry of target_modules names by a LoraLinear, and freezes all other parameters. The
// adapters have dtype `dtype`, are on the device of their Linear, and are uninitialised. Returns the paths of the
// replaced Linears. Call it before parallelize_model. Error kConfig: an entry that names no Linear of this model,
// settings out of range, or a model that has adapters already. No communication.
std::vector<std::string> add_adapters(CausalLM& model, const AdapterConfig& config,
                                      c10::ScalarType dtype = c10::ScalarType::Float);
using AdaptedLinears = std::vector<std::pair<std::string, nn::LoraLinear*>>;
// Returns the adapted Linears with their paths, in order; empty for a model without adapters.
AdaptedLinears adapted_linears(nn::Module& model);
// Returns a description of the adapters of a whole model, such as "q_proj, v_proj of 28 layers; experts and router stay
// frozen".
std::string describe_adapters(CausalLM& model);
// Returns the LoraDropout that all adapters share; null when the adapters have no dropout.
std::shared_ptr<nn::LoraDropout> adapter_dropout(CausalLM& model);

// Initialises the adapters as PEFT does. A is uniform in [-1 / sqrt(in), 1 / sqrt(in)]; each element depends only on
// the seed, the parameter's name and its global index. B is zero. DoRA's magnitudes are the norms of the rows of the
// base weight, which must be loaded. COLLECTIVE over the meshes of the weights with DoRA.
void init_adapters(CausalLM& model, uint64_t seed);
// Loads the values from adapter_weights_file(); each rank reads only its own shard. Tensors for Linears in other
// pipeline stages are ignored. All tensors that are missing, unexpected or of another shape are reported in one error
// before anything is changed: kFormat, or kShape when only shapes differ. No communication.
void load_adapters(CausalLM& model, const std::filesystem::path& folder);

struct SaveAdaptersOptions {
  std::string base = {};      // base_model_name_or_path in adapter_config.json
  std::string revision = {};  // revision of a base on the Hub; empty: main
  // The pipeline-parallel mesh (1-d): its ranks together have all stages of the model. Stages without adapters are
  // allowed. Null: this rank has the whole model. The rank that is rank 0 of the pipeline and the first rank of the
  // parameters' mesh writes the files.
  MeshPtr pipeline = {};
};
// Writes the adapters to `folder`, which must not exist or must be empty. The folder appears only when it is complete.
// COLLECTIVE over the pipeline and the meshes of the model's parameters: adapters are gathered, and one rank writes
// (SaveAdaptersOptions::pipeline). An error of the writing rank is thrown on all ranks.
void save_adapters(CausalLM& model, const std::filesystem::path& folder, const SaveAdaptersOptions& options = {});

// Returns the weight of an adapted Linear with its adapter merged. `whole` is the gathered base weight. COLLECTIVE over
// the meshes of the adapter.
at::Tensor merged_weight(nn::LoraLinear& linear, const at::Tensor& whole);

}  // namespace tessera
