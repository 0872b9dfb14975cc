// Low-rank adapters of a language model (LoRA, DoRA), in PEFT's format: adapter_config.json and
// adapter_model.safetensors (older ones: adapter_model.bin, which is read, too).
//
//   auto model = make_model(config, {.device = at::kMeta});
//   add_adapters(*model, {.rank = 8, .target_modules = {"q_proj", "v_proj"}});   // the rest is frozen
//   parallelize_model(*model, options); to_empty(*model, device);               // any layout, or none
//   load_pretrained(*model, dir);                                                // the base
//   init_adapters(*model, seed);                                                 // or load_adapters(*model, folder)
//   ...
//   save_adapters(*model, "out", {.base = dir});
//   save_pretrained(*model, "merged", dir, {.merge_adapters = true});            // weights.h
//
// A model belongs to one rank.
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

// How the entries of target_modules are read.
enum class TargetSyntax {
  kRecipe,       // names of Linears, whole paths or their last parts; regular expressions of the whole path; all-linear
  kPeftNames,    // a list of PEFT's: names alone, some of which may be those of other models
  kPeftPattern,  // a text of PEFT's: one regular expression of the whole path, a plain name too
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

// What a folder of PEFT's says. Error kFormat; kConfig for what this version does not do (another kind of adapter,
// ranks of single layers, saved modules, trained biases, initialisations that change the base).
AdapterConfig read_adapter_config(const std::filesystem::path& folder);
// adapter_model.safetensors of such a folder, else its adapter_model.bin. Error kIo where there is neither.
std::filesystem::path adapter_weights_file(const std::filesystem::path& folder);

// Puts a LoraLinear in place of every Linear that is meant, and freezes all other parameters. Adapters are of `dtype`,
// on the device of their Linears, uninitialised. Gives the paths of the Linears. Before parallelize_model. Error
// kConfig: a target that is no Linear here, settings out of range, a model that has adapters. No communication.
std::vector<std::string> add_adapters(CausalLM& model, const AdapterConfig& config,
                                      c10::ScalarType dtype = c10::ScalarType::Float);
using AdaptedLinears = std::vector<std::pair<std::string, nn::LoraLinear*>>;
// The adapted Linears by path, in order; none: a model without adapters.
AdaptedLinears adapted_linears(nn::Module& model);
// "q_proj, v_proj of 28 layers; experts and router stay frozen": where the adapters of a whole model are.
std::string describe_adapters(CausalLM& model);
// What all adapters share of their dropout; null where nothing is dropped.
std::shared_ptr<nn::LoraDropout> adapter_dropout(CausalLM& model);

// As PEFT: A uniform within 1 / sqrt(in) by a random number of seed, name and global element; B zero; magnitudes the
// norms of the base's rows, which must be there. COLLECTIVE over the meshes of the weights with DoRA.
void init_adapters(CausalLM& model, uint64_t seed);
// Values from adapter_weights_file(), each rank its own part; what is for Linears in other stages of a pipeline is
// left alone. Everything that is missing, unexpected or of another shape is reported before anything is changed:
// kFormat or kShape. No communication.
void load_adapters(CausalLM& model, const std::filesystem::path& folder);

struct SaveAdaptersOptions {
  std::string base = {};      // base_model_name_or_path, for PEFT
  std::string revision = {};  // of a base on the Hub; empty: main
  // 1-d, over the ranks whose stages make up the model, some of them without adapters; null: it is whole. The first of
  // them writes.
  MeshPtr pipeline = {};
};
// Writes the folder, which must not exist before, or be empty; it appears when it is complete. COLLECTIVE over the
// pipeline and the meshes of the model's parameters: adapters are gathered, and rank 0 of the mesh writes. An error of
// it is thrown on all.
void save_adapters(CausalLM& model, const std::filesystem::path& folder, const SaveAdaptersOptions& options = {});

// The weight of an adapted Linear with its adapter in it; `whole` is the weight gathered. COLLECTIVE over the meshes of
// the adapter.
at::Tensor merged_weight(nn::LoraLinear& linear, const at::Tensor& whole);

}  // namespace tessera
