// The recipe: all settings of one training run, read from YAML and `section.key=value` overrides.
//
//   train::Recipe recipe = train::read_recipe("recipes/smollm2.yaml", {"train.steps=20"});
//   train::RunLayout layout = train::resolve_layout(recipe, world->size());
//   double lr = recipe.optimizer.lr;
//
// The fields below hold the defaults. Help, unit, range and aliases of a key are declared once, in recipe_keys.cc and
// recipe_training_keys.cc. A recipe is plain data: copyable, and thread-safe to read.
#pragma once

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::train {

struct ModelSection {
  std::string path;  // Hugging Face folder
  // The name that the user gave, where resolve_model_source() replaced it by the folder `path`: ORG/NAME of the Hub, or
  // a GGUF file. Empty: `path` is as the user wrote it. This field has no key.
  std::string name;
  std::string weights;  // file or folder that the parameters are read from; empty: path
  std::string dtype = "float32";
  std::string init = "pretrained";
  double expert_capacity_factor = 0;
};

struct DataSection {
  std::vector<std::string> train;  // sources in the form of data_sources.h
  std::vector<std::string> validation;
  std::string format = "auto";
  std::vector<std::string> columns;
  int64_t sequence_length = 512;
  bool packing = true;
  std::string overlong = "truncate";
  bool train_on_inputs = false;
  std::string cache = "auto";
};

struct LoraSection {  // keys `model.lora.rank`, ...
  int64_t rank = 0;   // 0: no adapters, unless `path` is set
  double alpha = 16;
  double dropout = 0;
  std::vector<std::string> target_modules = {"all-linear"};
  bool rslora = false;
  bool dora = false;
  std::string path;
  bool merge = false;
  std::string quantize = "none";
  bool double_quant = false;

  bool is_enabled() const { return rank > 0 || !path.empty(); }  // the run trains adapters
};

struct ParallelSection {
  int64_t dp_replicate = 1;
  int64_t dp_shard = -1;
  int64_t tp = 1;
  int64_t cp = 1;
  int64_t pp = 1;
  int64_t ep = 1;
  std::string schedule = "1F1B";
  std::optional<int64_t> layers_per_stage;
  std::string cp_rotate_method = "allgather";
  bool sequence_parallel = false;
  std::string activation_checkpointing = "none";
  bool cpu_offload = false;
  bool defer_gradient_sync = false;
  std::string plan = "auto";
  bool replicate_kv = false;
};

struct OptimizerSection {
  std::string name = "adamw";
  double lr = 1e-4;
  std::vector<double> betas = {0.9, 0.95};
  double eps = 1e-8;
  double weight_decay = 0.1;
  double max_grad_norm = 1.0;
  bool master_weights = true;
  bool stochastic_rounding = false;
  bool early_step_in_backward = false;
  std::vector<std::string> groups;
  double momentum = 0.95;
  bool nesterov = true;
  int64_t ns_steps = 5;
  std::string adjust_lr_fn = "match_rms_adamw";
};

struct ScheduleSection {
  std::string name = "cosine";
  int64_t warmup_steps = 10;
  double min_lr_ratio = 0.1;
  std::optional<int64_t> decay_steps;
  double decay_ratio = 0.1;
  std::string decay_type = "cosine";
};

struct TrainSection {
  std::optional<int64_t> steps = 100;  // in a recipe that was read, exactly one of steps and epochs has a value
  std::optional<int64_t> epochs;
  int64_t global_batch_size = 8;
  int64_t local_batch_size = 2;
  int64_t seed = 42;
  std::string device = "auto";
  bool deterministic = false;
  bool layer_graphs = false;
  std::string on_nonfinite = "stop";
  int64_t validate_every = 20;
  int64_t early_stopping_patience = 0;  // keys `early_stopping.patience` and `early_stopping.min_delta`
  double early_stopping_min_delta = 0;
  int64_t sample_every = 0;
  bool profile = false;
  int64_t page = 0;  // port; 0: no page
};

struct PrecisionSection {
  std::string param = "float32";
  std::string reduce = "float32";
  std::string output = "float32";
  bool fp8 = false;
};

struct CheckpointSection {
  std::string dir = "runs/RECIPE-NAME";  // read_recipe() replaces RECIPE-NAME by Recipe::name
  int64_t every = 50;
  int64_t keep_last = 2;
  int64_t keep_best = 1;
  bool async = true;
  std::string resume = "auto";         // auto, never, or the folder of a checkpoint
  std::string export_model = "final";  // key `export`
};

struct LogSection {
  int64_t every = 1;
  bool tensorboard = true;
  bool jsonl = true;
};

struct CommSection {
  std::string backend = "auto";
  int64_t timeout_seconds = 300;
  std::string check = "timeout";
  bool high_priority_streams = false;
  bool split_groups = true;
};

struct Recipe {
  std::string name;  // name of the recipe file without its extension
  ModelSection model;
  LoraSection lora;
  DataSection data;
  ParallelSection parallel;
  OptimizerSection optimizer;
  ScheduleSection schedule;
  TrainSection train;
  PrecisionSection precision;
  CheckpointSection checkpoint;
  LogSection log;
  CommSection comm;
};

// Reads a recipe file, applies the overrides in order (the last one wins), and makes every check that does not need the
// world size. Error kConfig, one line that names file and line: a missing file, hostile YAML, an unknown key (the
// message names the nearest key), a value of the wrong type or range, keys that contradict one another.
Recipe read_recipe(const std::filesystem::path& file, std::span<const std::string> overrides = {});
// Like read_recipe() for the text of a recipe. `source` names the text in errors, and the file name of `source` without
// its extension is the name of the recipe.
Recipe parse_recipe(std::string_view yaml, const std::string& source, std::span<const std::string> overrides = {});

// A recipe for a verb that runs a model without training: `settings` may set keys of the sections parallel and comm;
// all other sections have their defaults. Rules of a training run are not checked; the verb checks the layouts that it
// supports. Error kConfig for a setting of another section and, as in read_recipe(), for an unknown key and for a value
// of the wrong type or range.
Recipe parse_layout_settings(std::span<const std::string> settings, const std::string& verb);

// The parallel section of a recipe for a given world size: every -1 is replaced, and data_parallel and micro_batches
// are computed.
struct RunLayout {
  int64_t dp_replicate = 1, dp_shard = 1, tp = 1, cp = 1, pp = 1, ep = 1;
  int64_t data_parallel = 1;  // dp_replicate * dp_shard: ranks that read different sequences
  int64_t micro_batches = 1;  // per rank and step: global_batch_size / (data_parallel * local_batch_size)
  // Number of ranks of one pipeline stage. Their rank numbers are consecutive: stage s begins at rank
  // s * ranks_of_stage().
  int64_t ranks_of_stage() const { return data_parallel * tp * cp; }
};

// Replaces the dim that is -1, if there is one, by `ranks` divided by the product of the other dims. Returns false and
// replaces nothing if two dims are -1 or the dims do not multiply to `ranks`.
bool fit_to_ranks(std::initializer_list<int64_t*> dims, int64_t ranks);
// Returns the RunLayout of the sizes in `dims` for `world_size` ranks. A size of -1 is computed from the other sizes,
// and micro_batches keeps its default 1. Error messages begin with `where`. Error kConfig: sizes that do not multiply
// to the world size, more than one size of -1, or an ep that does not divide the number of ranks of a pipeline stage.
RunLayout fit_layout(const ParallelSection& dims, int64_t world_size, const std::string& where);
// fit_layout() for a training run, with the number of micro-batches. Error kConfig as fit_layout(), and if
// train.global_batch_size is not a multiple of data_parallel * train.local_batch_size.
RunLayout resolve_layout(const Recipe& recipe, int64_t world_size);

}  // namespace tessera::train
