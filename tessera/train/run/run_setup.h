// Builds the parts of a run from its recipe: data, mesh, model, optimizer, and the state dict of a checkpoint.
//
//   RunData data = load_run_data(recipe);
//   auto model = build_model(recipe, config, run_mesh.mesh());     // sharded, with its weights
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/collectives/agreement.h"
#include "tessera/data/rows/dataset.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/models/adapters/adapters.h"
#include "tessera/models/decoder/causal_lm.h"
#include "tessera/optim/optimizer.h"
#include "tessera/optim/schedule.h"
#include "tessera/text/chat/chat_template.h"
#include "tessera/text/tokenizer.h"
#include "tessera/train/recipe/recipe.h"
#include "tessera/train/run/run_mesh.h"

namespace tessera::train {

struct RunData {
  std::shared_ptr<const text::Tokenizer> tokenizer;
  int64_t vocab_size = 0;             // vocab_size of the model's config.json
  std::vector<int32_t> end_tokens{};  // eos_token_id of generation_config.json, else of config.json
  std::optional<text::ChatTemplate> chat_template;
  std::shared_ptr<const data::Dataset> train;
  std::shared_ptr<const data::Dataset> validation;  // null when the recipe names none
};

// Reads, tokenizes and packs all data of the run, or reads the rows from data.cache. `quiet`: does not log which
// formats were recognised. Error kIo and kFormat name the file and line. No communication.
RunData load_run_data(const Recipe& recipe, bool quiet = false);
// Like load_run_data(), called on all ranks: one rank of each host tokenizes for all ranks of this host. `world_group`
// is the group of the world. COLLECTIVE over `world_group`.
RunData load_run_data_on_all_ranks(const Recipe& recipe, const comm::World& world, comm::Group& world_group);

// The config of model.path with the expert capacity of the recipe. Error kConfig for a data.sequence_length above the
// context of the model.
ModelConfig load_model_config(const Recipe& recipe);

// A text that names the device of a run with `ranks` ranks on this host, and the reason for it. No communication. Error
// kConfig as comm::describe_device().
std::string describe_run_device(const Recipe& recipe, int64_t ranks);
// The layout of the recipe over all ranks, on the device of train.device, which becomes the current device of this
// thread. Also applies the process-wide settings of the recipe: deterministic kernels, streams and groups of NCCL.
// COLLECTIVE over the world. Error kConfig if a rank has no such device, or the layout does not fit the world.
RunMesh build_run_mesh(const Recipe& recipe, const std::shared_ptr<comm::World>& world);

// One line: the parameters of the run's adapters and the modules that have them (describe_adapters()); empty if the run
// has no adapters.
std::string describe_run_adapters(const Recipe& recipe, const ModelConfig& config);

// A text of the adapter settings that must not change when a run resumes: rank, alpha, targets, variants, quantization.
// "none" if the run has no adapters.
std::string adapter_identity(const Recipe& recipe);

// The adapter config of the section lora, or of the folder lora.path if it is set. Empty if the run has no adapters.
// Errors as read_adapter_config().
std::optional<AdapterConfig> adapter_config(const Recipe& recipe);

// The file or folder that parameters are read from: model.weights, or else model.path.
std::filesystem::path weights_path(const Recipe& recipe);
// A hash of the model that a run starts from: of config.json, of lora.path, and of the weights unless they are drawn at
// random (of large files, both ends and some blocks between). Error kIo.
std::string model_fingerprint(const Recipe& recipe);

// Names and values that must be equal on all ranks: settings except paths, hashes of data and model, version. For
// comm::check_same().
comm::NamedValues run_facts(const Recipe& recipe, const RunData& data, const std::string& model);

// Number of elements of all parameters; a tied parameter counts once.
int64_t count_parameters(CausalLM& model);

// Checks optimizer.groups against the names of the whole model with its adapters. A rank of a pipeline cannot check its
// own stage alone, because a group may match parameters of other stages only. Error kConfig as parameter_groups().
void check_parameter_groups(const Recipe& recipe, const ModelConfig& config);

// The model of the recipe on the meta device: this rank's pipeline stages, with adapters if the recipe has them,
// parallelized over the other dims of the mesh (parallelize_model). COLLECTIVE over the mesh. Error kConfig if the
// model cannot be parallelized over this mesh.
std::shared_ptr<CausalLM> lay_out_model(const Recipe& recipe, const ModelConfig& config, const MeshPtr& mesh);
// Runs lay_out_model() as rank `rank` of the layout, with a fake world and without memory, to find errors before data
// and weights are read. Warnings are logged for the first rank of a stage only. No communication. Errors as
// lay_out_model().
void check_parallel_model(const Recipe& recipe, const RunLayout& layout, const ModelConfig& config, int64_t rank);

// Makes the model with lay_out_model(), allocates it on the device of the mesh, and fills its parameters: from the
// weight files, or with random values if model.init is "random"; adapters are loaded from lora.path or initialised.
// Each rank reads only its own shards. COLLECTIVE over the mesh.
std::shared_ptr<CausalLM> build_model(const Recipe& recipe, const ModelConfig& config, const MeshPtr& mesh);

// One line about the dtypes of parameters and optimizer state, for runs whose model.dtype is not float32.
std::string describe_precision(const Recipe& recipe);
std::unique_ptr<optim::Optimizer> build_optimizer(const Recipe& recipe, CausalLM& model);
// State dict of model and optimizer under the names of a checkpoint: "model.NAME" and "optim.KEY", as in torch's
// get_state_dict with flatten_optimizer_state_dict.
struct TrainingState {
  NamedTensors tensors;  // share memory with model and optimizer: loading a checkpoint into them resumes
  NamedObjects objects;  // hyper-parameters, written for PyTorch; a resumed run takes them from its recipe
};
TrainingState training_state(CausalLM& model, optim::Optimizer& optimizer);
// The entries of `state` that this pipeline stage saves. A tied weight is held by two stages and saved by the first
// one. COLLECTIVE over the pipeline.
TrainingState tensors_saved_by_stage(const TrainingState& state, comm::Group& pipeline);

// The number of rows that a run with train.epochs trains on, summed over all epochs. nullopt with train.steps, where
// every step has a full batch.
std::optional<int64_t> total_rows(const Recipe& recipe, const data::Dataset& dataset);
// The number of steps that train on `rows` rows in all; the last step may have fewer rows than the others.
int64_t steps_for_rows(const Recipe& recipe, int64_t rows);
// Steps of the whole run: train.steps, or the steps of train.epochs over the rows of the data.
int64_t total_steps(const Recipe& recipe, const data::Dataset& dataset);

}  // namespace tessera::train
