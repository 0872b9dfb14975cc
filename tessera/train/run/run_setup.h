// What a run is made of, built from its recipe: data, model, optimizer state by name.
//
//   RunData data = load_run_data(recipe);
//   auto model = build_model(recipe, config, place.mesh());        // sharded, weights in place
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
  int64_t vocab_size = 0;             // of the model
  std::vector<int32_t> end_tokens{};  // eos_token_id of generation_config.json, else of config.json
  std::optional<text::ChatTemplate> chat_template;
  std::shared_ptr<const data::Dataset> train;
  std::shared_ptr<const data::Dataset> validation;  // null when the recipe names none
};

// Reads and packs all data of the run, or finds it tokenized in data.cache. Error kIo and kFormat name the file and
// line. `quiet`: what was recognised is not logged. No communication.
RunData load_run_data(const Recipe& recipe, bool quiet = false);
// The same on every rank, tokenized by one rank of each host. COLLECTIVE over `everyone`, which is the world.
RunData load_run_data_together(const Recipe& recipe, const comm::World& world, comm::Group& everyone);

// The config of model.path, checked against the recipe: sequence length within the context, dtype. Error kConfig.
ModelConfig load_model_config(const Recipe& recipe);

// Which device a run of so many ranks on this host computes on, and why. No communication. Error kConfig as
// comm::describe_device.
std::string describe_run_device(const Recipe& recipe, int64_t ranks);
// The recipe's layout over all ranks, on the device of train.device, which becomes this thread's current one.
// COLLECTIVE over the world. Error kConfig when some rank has no such device, or the layout does not fit the world.
RunMesh build_run_mesh(const Recipe& recipe, const std::shared_ptr<comm::World>& world);

// Where the run's adapters are and how many parameters they have; empty without. As of describe_adapters().
std::string describe_run_adapters(const Recipe& recipe, const ModelConfig& config);

// What must be alike for adapters to go on from a checkpoint's.
std::string identity_of_adapters(const Recipe& recipe);

// What the section lora says: of lora.path, where it is set. None: the run has no adapters. Error as
// read_adapter_config's.
std::optional<AdapterConfig> adapter_config(const Recipe& recipe);

// Where the values of the parameters come from: model.weights, else model.path.
std::filesystem::path weights_path(const Recipe& recipe);
// What tells the model that a run starts from: config.json and, unless it is drawn, the weights (both ends and some
// places of each file). Error kIo.
std::string model_fingerprint(const Recipe& recipe);

// What must be the same on all ranks: settings that are no paths, data, model, version. For comm::check_same().
comm::Facts run_facts(const Recipe& recipe, const RunData& data, const std::string& model);

// Elements of all parameters, a tied one once.
int64_t count_parameters(CausalLM& model);

// Whether optimizer.groups mean something in the whole model, adapters and all; no rank of a pipeline could tell. Error
// kConfig as parameter_groups.
void check_parameter_groups(const Recipe& recipe, const ModelConfig& config);

// This rank's stages of the model of the recipe, with its adapters where it has any, parallel over the other dims of
// the mesh (parallelize_model), on the meta device. COLLECTIVE over the mesh. Error kConfig where the model cannot be
// laid out so.
std::shared_ptr<CausalLM> lay_out_model(const Recipe& recipe, const ModelConfig& config, const MeshPtr& mesh);
// Lays the model out as `rank` of the layout would, without the others and without memory, so that what cannot be is
// known before data and weights are read. Warnings come from the first rank of a stage. No communication. Errors as
// lay_out_model's.
void check_parallel_model(const Recipe& recipe, const RunLayout& layout, const ModelConfig& config, int64_t rank);

// The same with its parameters read or drawn: unless replicated no rank holds all of it. COLLECTIVE over the mesh.
std::shared_ptr<CausalLM> build_model(const Recipe& recipe, const ModelConfig& config, const MeshPtr& mesh);

// One line about the dtypes of parameters and optimizer state, for runs whose model.dtype is not float32.
std::string describe_precision(const Recipe& recipe);
std::unique_ptr<optim::Optimizer> build_optimizer(const Recipe& recipe, CausalLM& model);
// What a checkpoint holds of a run, by its names there: "model.NAME" and "optim.KEY", as torch's get_state_dict with
// flatten_optimizer_state_dict calls them.
struct TrainingState {
  NamedTensors tensors;  // they share memory with model and optimizer: loading into them resumes
  NamedObjects objects;  // hyper-parameters, for PyTorch; a resumed run has those of its recipe
};
TrainingState training_state(CausalLM& model, optim::Optimizer& optimizer);
// Of a state what this stage of a pipeline saves: a tied weight is of two, and the first of them saves it. COLLECTIVE
// over the pipeline.
TrainingState saved_of_stage(const TrainingState& state, comm::Group& pipeline);

// Rows that a run with train.epochs takes, all passes together; none with train.steps, whose steps are all full.
std::optional<int64_t> total_rows(const Recipe& recipe, const data::Dataset& dataset);
// Steps that take so many rows; the last may be short.
int64_t steps_for_rows(const Recipe& recipe, int64_t rows);
// Steps of the whole run: train.steps, or train.epochs over the rows of the data.
int64_t total_steps(const Recipe& recipe, const data::Dataset& dataset);

}  // namespace tessera::train
