// Every section of a recipe, and the keys of the model, its data and its layout: what each is, what it takes, what it
// is by default. Those of training are in recipe_training_keys.cc.
#include <array>
#include <utility>

#include "tessera/data/records/data_source.h"
#include "tessera/train/recipe/recipe_field.h"

namespace tessera::train {
namespace {

constexpr Range kDimension{.minimum = -1, .maximum = 1 << 24, .without_zero = true};

std::vector<RecipeKey> make_model_keys() {
  return {
      {.name = "path",
       .field = field_of<&ModelSection::path>,
       .help = "Hugging Face folder (config.json, safetensors, tokenizer.json), GGUF file, ORG/NAME in the Hub's local "
               "cache, "
               "or a run or checkpoint of one: its weights, and the model that it started from",
       .required = true,
       .aliases = {"model.hf_assets_path", "model.pretrained_model_name_or_path", "policy.model_name"}},
      {.name = "weights",
       .field = field_of<&ModelSection::weights>,
       .help = "Start from these weights instead of those in model.path: a run's or PyTorch's distributed checkpoint, "
               "safetensors, a torch.save file, a GGUF file",
       .aliases = {"checkpoint.initial_load_path"}},
      {.name = "dtype",
       .field = field_of<&ModelSection::dtype>,
       .help = "Dtype of the exported model; while training parameters have it too without optimizer.master_weights",
       .allowed = kDtypes,
       .aliases = {"training.dtype", "model.torch_dtype"}},
      {.name = "init",
       .field = field_of<&ModelSection::init>,
       .help = "pretrained reads the weights; random needs config.json only",
       .allowed = {"pretrained", "random"}},
      {.name = "expert_capacity_factor",
       .field = field_of<&ModelSection::expert_capacity_factor>,
       .help =
           "Drop tokens: in training an expert takes at most this many times its even share of a sequence's tokens, "
           "those with the largest weights; 0: it takes all",
       .range = {.minimum = 0, .maximum = 1 << 12},
       .aliases = {"model.moe_expert_capacity_factor"}},
      {.name = "lora.rank",
       .field = field_of<&LoraSection::rank>,
       .help = "Train adapters of this rank and leave the model as it is; 0: train the model",
       .range = {.minimum = 0, .maximum = 1 << 20},
       .aliases = {"lora.rank", "peft.dim", "policy.dtensor_cfg.lora_cfg.dim"}},
      {.name = "lora.alpha",
       .field = field_of<&LoraSection::alpha>,
       .help = "Adapters count alpha / rank times",
       .range = {.minimum = 0, .maximum = 1e9, .above_minimum = true},
       .aliases = {"lora.alpha", "peft.alpha", "policy.dtensor_cfg.lora_cfg.alpha"}},
      {.name = "lora.dropout",
       .field = field_of<&LoraSection::dropout>,
       .help = "Share of an adapter's inputs that is dropped while training, by train.seed and the place in the data",
       .range = {.minimum = 0, .maximum = 1, .below_maximum = true},
       .aliases = {"lora.dropout", "peft.dropout", "policy.dtensor_cfg.lora_cfg.dropout"}},
      {.name = "lora.targets",
       .field = field_of<&LoraSection::target_modules>,
       .help =
           "Which linear layers have adapters: names (q_proj), regular expressions of the whole path, or all-linear",
       .aliases = {"lora.target_modules", "peft.target_modules", "policy.dtensor_cfg.lora_cfg.target_modules"}},
      {.name = "lora.rslora",
       .field = field_of<&LoraSection::rslora>,
       .help = "Adapters count alpha / sqrt(rank) times",
       .aliases = {"lora.rslora"}},
      {.name = "lora.dora",
       .field = field_of<&LoraSection::dora>,
       .help = "DoRA: the norm of each row of an adapted weight is learnt, too",
       .aliases = {"lora.dora", "peft.use_dora"}},
      {.name = "lora.path",
       .field = field_of<&LoraSection::path>,
       .help = "Start from the adapters in this folder of PEFT's; rank, alpha, targets, rslora and dora are "
               "theirs then",
       .aliases = {"lora.path"}},
      {.name = "lora.merge",
       .field = field_of<&LoraSection::merge>,
       .help = "Export the model with its adapters added; false: the adapters, as PEFT saves them",
       .aliases = {"lora.merge"}},
      {.name = "lora.quantize",
       .field = field_of<&LoraSection::quantize>,
       .help =
           "QLoRA: keep the linear layers of the model packed beside their adapters, whole on each rank of a stage. "
           "nf4: in 4 bits, packed while they are read; gguf: as the GGUF file that model.weights names has them "
           "(Q4_K, Q8_0, ...)",
       .allowed = {"none", "nf4", "gguf"},
       .aliases = {"lora.quantize"}},
      {.name = "lora.double_quant",
       .field = field_of<&LoraSection::double_quant>,
       .help = "Of nf4: the scales of blocks in 8 bits, 0.37 bits an element less",
       .aliases = {"lora.double_quant"}},
  };
}

std::vector<RecipeKey> make_data_keys() {
  return {
      {.name = "train",
       .field = field_of<&DataSection::train>,
       .help = "Files to train on: a path (a file, a folder of shards, a pattern) or a list; an item may be a mapping "
               "of path, weight, format, columns, split. docs/data.md",
       .mappings = Mappings::kSources,
       .required = true,
       .aliases = {"training.dataset_path", "dataset.path_or_dataset_id"}},
      {.name = "validation",
       .field = field_of<&DataSection::validation>,
       .help = "Held-out files, as train; empty: no validation",
       .mappings = Mappings::kSources,
       .aliases = {"validation.dataset_path", "validation_dataset.path_or_dataset_id"}},
      {.name = "format",
       .field = field_of<&DataSection::format>,
       .help = "What records are; auto looks at the first of each file, jsonl at each for itself",
       .allowed = {std::begin(data::kFormats), std::end(data::kFormats)}},
      {.name = "columns",
       .field = field_of<&DataSection::columns>,
       .help = "Columns that the files call otherwise, {OURS: THEIRS}, as in {messages: dialogue}",
       .mappings = Mappings::kPairs},
      {.name = "sequence_length",
       .field = field_of<&DataSection::sequence_length>,
       .help = "Length of one sequence",
       .unit = "tokens",
       .range = {.minimum = 2, .maximum = 1 << 24},
       .aliases = {"training.seq_len", "dataset.seq_length", "packed_sequence.packed_sequence_size",
                   "policy.max_total_sequence_length"}},
      {.name = "packing",
       .field = field_of<&DataSection::packing>,
       .help = "Several documents in one sequence, each seeing only itself",
       .aliases = {"policy.sequence_packing.enabled"}},
      {.name = "overlong",
       .field = field_of<&DataSection::overlong>,
       .help = "What becomes of a sample longer than sequence_length",
       .allowed = {"truncate", "drop", "error"}},
      {.name = "train_on_inputs",
       .field = field_of<&DataSection::train_on_inputs>,
       .help = "Learn prompts and what users say, too; else completions and what the assistant says"},
      {.name = "cache",
       .field = field_of<&DataSection::cache>,
       .help = "Folder that keeps tokenized data for later starts; auto: tessera/data in $XDG_CACHE_HOME or ~/.cache; "
               "off: none"},
  };
}

std::vector<RecipeKey> make_parallel_keys() {
  return {
      {.name = "dp_replicate",
       .field = field_of<&ParallelSection::dp_replicate>,
       .help = "Replicas of the sharded model, or with dp_shard 1 of the whole one (DDP); -1: what is left",
       .unit = "ranks",
       .range = kDimension,
       .aliases = {"parallelism.data_parallel_replicate_degree", "distributed.dp_replicate_size"}},
      {.name = "dp_shard",
       .field = field_of<&ParallelSection::dp_shard>,
       .help = "FSDP: ranks that share one copy of parameters and optimizer; -1: what is left",
       .unit = "ranks",
       .range = kDimension,
       .aliases = {"parallelism.data_parallel_shard_degree"}},
      {.name = "tp",
       .field = field_of<&ParallelSection::tp>,
       .help = "Tensor parallelism: ranks that share heads, inner widths and vocabulary; -1: what is left",
       .unit = "ranks",
       .range = kDimension,
       .aliases = {"parallelism.tensor_parallel_degree", "distributed.tp_size",
                   "policy.dtensor_cfg.tensor_parallel_size"}},
      {.name = "cp",
       .field = field_of<&ParallelSection::cp>,
       .help = "Context parallelism: ranks that share the tokens of each sequence; -1: what is left",
       .unit = "ranks",
       .range = kDimension,
       .aliases = {"parallelism.context_parallel_degree", "distributed.cp_size",
                   "policy.dtensor_cfg.context_parallel_size"}},
      {.name = "pp",
       .field = field_of<&ParallelSection::pp>,
       .help = "Pipeline parallelism: ranks that share the layers; -1: what is left",
       .unit = "ranks",
       .range = kDimension,
       .aliases = {"parallelism.pipeline_parallel_degree", "distributed.pp_size"}},
      {.name = "ep",
       .field = field_of<&ParallelSection::ep>,
       .help = "Expert parallelism; takes no ranks of its own, divides dp x cp x tp",
       .unit = "ranks",
       .range = {.minimum = 1, .maximum = 1 << 24},
       .aliases = {"parallelism.expert_parallel_degree", "distributed.ep_size"}},
      {.name = "schedule",
       .field = field_of<&ParallelSection::schedule>,
       .help = "With pp: in which order a rank takes the micro-batches. The last five give each rank several stages",
       .allowed = {"1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble",
                   "DualPipeV"},
       .aliases = {"parallelism.pipeline_parallel_schedule", "distributed.pipeline.pp_schedule"}},
      {.name = "layers_per_stage",
       .field = field_of<&ParallelSection::layers_per_stage>,
       .help = "With pp: layers of a stage, which gives the number of stages; null: one stage a rank, or two where the "
               "schedule wants several",
       .unit = "layers",
       .range = {.minimum = 1, .maximum = 1 << 24},
       .aliases = {"parallelism.pipeline_parallel_layers_per_stage", "distributed.pipeline.layers_per_stage"}},
      {.name = "cp_rotate_method",
       .field = field_of<&ParallelSection::cp_rotate_method>,
       .help = "With cp: all keys and values are gathered at once (allgather), or go around the ranks beside the "
               "products (alltoall), which keeps less in memory",
       .allowed = {"allgather", "alltoall"},
       .aliases = {"parallelism.context_parallel_rotate_method"}},
      {.name = "sequence_parallel",
       .field = field_of<&ParallelSection::sequence_parallel>,
       .help = "Shard activations between tensor-parallel blocks along the sequence",
       .aliases = {"distributed.sequence_parallel", "policy.dtensor_cfg.sequence_parallel"}},
      {.name = "activation_checkpointing",
       .field = field_of<&ParallelSection::activation_checkpointing>,
       .help = "Compute activations again in backward instead of keeping them: those of each layer's MLP (mlp, or "
               "true), of "
               "each layer (full), or of each layer but attention and every second product (selective)",
       .allowed = {"none", "mlp", "selective", "full", "true", "false"},
       .aliases = {"activation_checkpoint.mode"}},
      {.name = "cpu_offload",
       .field = field_of<&ParallelSection::cpu_offload>,
       .help = "Keep shards, gradients and optimizer state in host memory; on CPUs they are there anyway",
       .aliases = {"training.enable_cpu_offload", "policy.dtensor_cfg.cpu_offload"}},
      {.name = "defer_gradient_sync",
       .field = field_of<&ParallelSection::defer_gradient_sync>,
       .help =
           "FSDP: reduce gradients once a step, not after each micro-batch; less traffic, but every rank then holds "
           "them whole, in precision.reduce. With pp the layers of a stage are gathered once as well, and held whole",
       .aliases = {"distributed.defer_fsdp_grad_sync"}},
      {.name = "plan",
       .field = field_of<&ParallelSection::plan>,
       .help = "How tp shards the model. auto: the family's own plan; hf: transformers' plan; or a YAML file, from "
               "pattern of "
               "modules to style",
       .aliases = {"policy.dtensor_cfg.custom_parallel_plan"}},
      {.name = "replicate_kv",
       .field = field_of<&ParallelSection::replicate_kv>,
       .help = "With fewer key-value heads than tp, a multiple of them: every rank keeps their projections whole"},
  };
}

}  // namespace

std::span<const RecipeSectionInfo> recipe_sections() {
  static constexpr std::array kSections{
      RecipeSectionInfo{"model", "What is trained", make_model_keys},
      RecipeSectionInfo{"data", "What it is trained on", make_data_keys},
      RecipeSectionInfo{"parallel", "How it is spread over ranks", make_parallel_keys},
      RecipeSectionInfo{"optimizer", "How parameters move", make_optimizer_keys},
      RecipeSectionInfo{"schedule", "The learning rate over time", make_schedule_keys},
      RecipeSectionInfo{"train", "How long, in which batches", make_train_keys},
      RecipeSectionInfo{"precision", "Dtypes of compute and communication", make_precision_keys},
      RecipeSectionInfo{"checkpoint", "What is saved, where, how often", make_checkpoint_keys},
      RecipeSectionInfo{"log", "What is reported", make_log_keys},
      RecipeSectionInfo{"comm", "How ranks talk", make_comm_keys},
  };
  return kSections;
}

std::span<const RecipeKey> recipe_keys() {
  static const std::vector<RecipeKey> kKeys = [] {
    std::vector<RecipeKey> keys;
    for (const auto& section : recipe_sections()) {
      for (auto& key : section.make_keys()) {
        key.section = section.name;
        keys.push_back(std::move(key));
      }
    }
    return keys;
  }();
  return kKeys;
}

}  // namespace tessera::train
