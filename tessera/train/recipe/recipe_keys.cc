// The table of all sections of a recipe, and the keys of the sections model, data and parallel. The keys of the other
// sections are in recipe_training_keys.cc. A row gives a key its help, unit, range and aliases; type and default come
// from its field in recipe.h.
#include <array>
#include <utility>

#include "tessera/data/records/data_source.h"
#include "tessera/train/recipe/recipe_field.h"

namespace tessera::train {
namespace {

constexpr ValueRange kDimension{.minimum = -1, .maximum = 1 << 24, .without_zero = true};

std::vector<RecipeKey> make_model_keys() {
  return {
      {.name = "path",
       .field = field_of<&ModelSection::path>,
       .help = "Hugging Face folder (config.json, safetensors, tokenizer.json), GGUF file, ORG/NAME in the Hub's local "
               "cache, or a run or checkpoint of a run: its weights, with config.json and tokenizer of the model that "
               "the run started from",
       .required = true,
       .aliases = {"model.hf_assets_path", "model.pretrained_model_name_or_path", "policy.model_name"}},
      {.name = "weights",
       .field = field_of<&ModelSection::weights>,
       .help = "Read the weights from here instead of model.path: a distributed checkpoint (of a run or of PyTorch), "
               "safetensors, a torch.save file, a GGUF file",
       .aliases = {"checkpoint.initial_load_path"}},
      {.name = "dtype",
       .field = field_of<&ModelSection::dtype>,
       .help = "Dtype of the exported model; with optimizer.master_weights false it is also the dtype of the "
               "parameters during training",
       .allowed = kDtypes,
       .aliases = {"training.dtype", "model.torch_dtype"}},
      {.name = "init",
       .field = field_of<&ModelSection::init>,
       .help = "pretrained reads the weights; random needs config.json only",
       .allowed = {"pretrained", "random"}},
      {.name = "expert_capacity_factor",
       .field = field_of<&ModelSection::expert_capacity_factor>,
       .help = "Token dropping: in training an expert processes at most its even share of a sequence's tokens times "
               "this factor and keeps the tokens with the largest router weights; 0: no token is dropped",
       .range = {.minimum = 0, .maximum = 1 << 12},
       .aliases = {"model.moe_expert_capacity_factor"}},
      {.name = "lora.rank",
       .field = field_of<&LoraSection::rank>,
       .help = "Rank of the adapters that are trained while the model stays frozen; 0: no adapters, the model itself "
               "is trained",
       .range = {.minimum = 0, .maximum = 1 << 20},
       .aliases = {"lora.rank", "peft.dim", "policy.dtensor_cfg.lora_cfg.dim"}},
      {.name = "lora.alpha",
       .field = field_of<&LoraSection::alpha>,
       .help = "The output of an adapter is scaled by alpha / rank",
       .range = {.minimum = 0, .maximum = 1e9, .above_minimum = true},
       .aliases = {"lora.alpha", "peft.alpha", "policy.dtensor_cfg.lora_cfg.alpha"}},
      {.name = "lora.dropout",
       .field = field_of<&LoraSection::dropout>,
       .help = "Dropout probability of the inputs of an adapter in training; the mask depends on train.seed and the "
               "position in the data",
       .range = {.minimum = 0, .maximum = 1, .below_maximum = true},
       .aliases = {"lora.dropout", "peft.dropout", "policy.dtensor_cfg.lora_cfg.dropout"}},
      {.name = "lora.targets",
       .field = field_of<&LoraSection::target_modules>,
       .help = "Linear layers that get adapters: names (q_proj), regular expressions that match the whole path, or "
               "all-linear",
       .aliases = {"lora.target_modules", "peft.target_modules", "policy.dtensor_cfg.lora_cfg.target_modules"}},
      {.name = "lora.rslora",
       .field = field_of<&LoraSection::rslora>,
       .help = "Scale the output of an adapter by alpha / sqrt(rank) instead of alpha / rank",
       .aliases = {"lora.rslora"}},
      {.name = "lora.dora",
       .field = field_of<&LoraSection::dora>,
       .help = "DoRA: also train the norm of each row of an adapted weight",
       .aliases = {"lora.dora", "peft.use_dora"}},
      {.name = "lora.path",
       .field = field_of<&LoraSection::path>,
       .help = "Start from the adapters in this PEFT folder; rank, alpha, targets, rslora and dora then come from the "
               "folder",
       .aliases = {"lora.path"}},
      {.name = "lora.merge",
       .field = field_of<&LoraSection::merge>,
       .help = "Export the model with the adapters merged into its weights; false: export the adapters alone, in "
               "PEFT's format",
       .aliases = {"lora.merge"}},
      {.name = "lora.quantize",
       .field = field_of<&LoraSection::quantize>,
       .help = "QLoRA: keep the weights of the model's linear layers quantized; each rank of a pipeline stage holds "
               "them unsharded. nf4: 4 bits, quantized while the weights are read; gguf: the blocks of the GGUF file "
               "that model.weights names (Q4_K, Q8_0, ...)",
       .allowed = {"none", "nf4", "gguf"},
       .aliases = {"lora.quantize"}},
      {.name = "lora.double_quant",
       .field = field_of<&LoraSection::double_quant>,
       .help = "With nf4: store the scales of the blocks in 8 bits, which saves 0.37 bits per element",
       .aliases = {"lora.double_quant"}},
  };
}

std::vector<RecipeKey> make_data_keys() {
  return {
      {.name = "train",
       .field = field_of<&DataSection::train>,
       .help = "Files to train on: a path (a file, a folder of shards, a pattern) or a list; an item may be a mapping "
               "of path, weight, format, columns, split. docs/data.md",
       .mappings = AcceptedMappings::kSources,
       .required = true,
       .aliases = {"training.dataset_path", "dataset.path_or_dataset_id"}},
      {.name = "validation",
       .field = field_of<&DataSection::validation>,
       .help = "Validation files, in the same form as data.train; empty: no validation",
       .mappings = AcceptedMappings::kSources,
       .aliases = {"validation.dataset_path", "validation_dataset.path_or_dataset_id"}},
      {.name = "format",
       .field = field_of<&DataSection::format>,
       .help = "Kind of the records; auto detects it from the first record of each file, jsonl from each record",
       .allowed = {std::begin(data::kFormats), std::end(data::kFormats)}},
      {.name = "columns",
       .field = field_of<&DataSection::columns>,
       .help = "Columns that have another name in the files: {OURS: THEIRS}, as in {messages: dialogue}",
       .mappings = AcceptedMappings::kPairs},
      {.name = "sequence_length",
       .field = field_of<&DataSection::sequence_length>,
       .help = "Length of one sequence",
       .unit = "tokens",
       .range = {.minimum = 2, .maximum = 1 << 24},
       .aliases = {"training.seq_len", "dataset.seq_length", "packed_sequence.packed_sequence_size",
                   "policy.max_total_sequence_length"}},
      {.name = "packing",
       .field = field_of<&DataSection::packing>,
       .help = "Pack several documents into one sequence; a token attends only to its own document",
       .aliases = {"policy.sequence_packing.enabled"}},
      {.name = "overlong",
       .field = field_of<&DataSection::overlong>,
       .help = "What is done with a sample longer than sequence_length",
       .allowed = {"truncate", "drop", "error"}},
      {.name = "train_on_inputs",
       .field = field_of<&DataSection::train_on_inputs>,
       .help = "Train on prompts and user turns, too; false: only on completions and assistant turns"},
      {.name = "cache",
       .field = field_of<&DataSection::cache>,
       .help = "Folder that keeps tokenized data for later runs; auto: tessera/data in $XDG_CACHE_HOME or ~/.cache; "
               "off: no cache"},
  };
}

std::vector<RecipeKey> make_parallel_keys() {
  return {
      {.name = "dp_replicate",
       .field = field_of<&ParallelSection::dp_replicate>,
       .help = "Data parallel replicas: of the sharded model (HSDP), or with dp_shard 1 of the whole model (DDP); -1: "
               "all remaining ranks",
       .unit = "ranks",
       .range = kDimension,
       .aliases = {"parallelism.data_parallel_replicate_degree", "distributed.dp_replicate_size"}},
      {.name = "dp_shard",
       .field = field_of<&ParallelSection::dp_shard>,
       .help = "FSDP: ranks that parameters and optimizer state are sharded over; -1: all remaining ranks",
       .unit = "ranks",
       .range = kDimension,
       .aliases = {"parallelism.data_parallel_shard_degree"}},
      {.name = "tp",
       .field = field_of<&ParallelSection::tp>,
       .help =
           "Tensor parallelism: ranks that heads, MLP widths and vocabulary are sharded over; -1: all remaining ranks",
       .unit = "ranks",
       .range = kDimension,
       .aliases = {"parallelism.tensor_parallel_degree", "distributed.tp_size",
                   "policy.dtensor_cfg.tensor_parallel_size"}},
      {.name = "cp",
       .field = field_of<&ParallelSection::cp>,
       .help = "Context parallelism: ranks that the tokens of each sequence are sharded over; -1: all remaining ranks",
       .unit = "ranks",
       .range = kDimension,
       .aliases = {"parallelism.context_parallel_degree", "distributed.cp_size",
                   "policy.dtensor_cfg.context_parallel_size"}},
      {.name = "pp",
       .field = field_of<&ParallelSection::pp>,
       .help = "Pipeline parallelism: ranks that the layers are divided over; -1: all remaining ranks",
       .unit = "ranks",
       .range = kDimension,
       .aliases = {"parallelism.pipeline_parallel_degree", "distributed.pp_size"}},
      {.name = "ep",
       .field = field_of<&ParallelSection::ep>,
       .help = "Expert parallelism: ranks that the experts are divided over; uses the ranks of dp x cp x tp and must "
               "divide their number",
       .unit = "ranks",
       .range = {.minimum = 1, .maximum = 1 << 24},
       .aliases = {"parallelism.expert_parallel_degree", "distributed.ep_size"}},
      {.name = "schedule",
       .field = field_of<&ParallelSection::schedule>,
       .help = "With pp: pipeline schedule, the order in which a rank runs its micro-batches. The last five have "
               "several stages per rank",
       .allowed = {"1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble",
                   "DualPipeV"},
       .aliases = {"parallelism.pipeline_parallel_schedule", "distributed.pipeline.pp_schedule"}},
      {.name = "layers_per_stage",
       .field = field_of<&ParallelSection::layers_per_stage>,
       .help = "With pp: layers of a stage, which sets the number of stages; null: one stage per rank, or two where "
               "the schedule needs several",
       .unit = "layers",
       .range = {.minimum = 1, .maximum = 1 << 24},
       .aliases = {"parallelism.pipeline_parallel_layers_per_stage", "distributed.pipeline.layers_per_stage"}},
      {.name = "cp_rotate_method",
       .field = field_of<&ParallelSection::cp_rotate_method>,
       .help = "With cp: gather all keys and values at once (allgather), or pass them around the ranks while attention "
               "is computed (alltoall), which needs less memory",
       .allowed = {"allgather", "alltoall"},
       .aliases = {"parallelism.context_parallel_rotate_method"}},
      {.name = "sequence_parallel",
       .field = field_of<&ParallelSection::sequence_parallel>,
       .help = "Shard activations between tensor-parallel blocks along the sequence",
       .aliases = {"distributed.sequence_parallel", "policy.dtensor_cfg.sequence_parallel"}},
      {.name = "activation_checkpointing",
       .field = field_of<&ParallelSection::activation_checkpointing>,
       .help = "Recompute activations in backward instead of keeping them: those of each layer's MLP (mlp, or true), "
               "of each layer (full), or of each layer except attention and every second matrix product (selective)",
       .allowed = {"none", "mlp", "selective", "full", "true", "false"},
       .aliases = {"activation_checkpoint.mode"}},
      {.name = "cpu_offload",
       .field = field_of<&ParallelSection::cpu_offload>,
       .help =
           "Keep shards, gradients and optimizer state in host memory; without effect on CPUs, where they always are",
       .aliases = {"training.enable_cpu_offload", "policy.dtensor_cfg.cpu_offload"}},
      {.name = "defer_gradient_sync",
       .field = field_of<&ParallelSection::defer_gradient_sync>,
       .help = "FSDP: reduce gradients once per step instead of after each micro-batch; less traffic, but every rank "
               "then holds unsharded gradients, in precision.reduce. With pp the layers of a stage are also gathered "
               "only once per step, and stay unsharded until its end",
       .aliases = {"distributed.defer_fsdp_grad_sync"}},
      {.name = "plan",
       .field = field_of<&ParallelSection::plan>,
       .help = "How tp shards the model. auto: the plan of the model family; hf: the plan of transformers; or a YAML "
               "file that maps patterns of module names to styles",
       .aliases = {"policy.dtensor_cfg.custom_parallel_plan"}},
      {.name = "replicate_kv",
       .field = field_of<&ParallelSection::replicate_kv>,
       .help = "With fewer key-value heads than tp, where tp is a multiple of their number: every rank keeps the key "
               "and value projections unsharded"},
  };
}

}  // namespace

std::span<const RecipeSectionInfo> recipe_sections() {
  static constexpr std::array kSections{
      RecipeSectionInfo{"model", "The model and its adapters", make_model_keys},
      RecipeSectionInfo{"data", "Training and validation data", make_data_keys},
      RecipeSectionInfo{"parallel", "Parallelism: how model and data are distributed over the ranks",
                        make_parallel_keys},
      RecipeSectionInfo{"optimizer", "The optimizer", make_optimizer_keys},
      RecipeSectionInfo{"schedule", "The learning rate schedule", make_schedule_keys},
      RecipeSectionInfo{"train", "Duration, batches, validation and device", make_train_keys},
      RecipeSectionInfo{"precision", "Dtypes of compute and communication", make_precision_keys},
      RecipeSectionInfo{"checkpoint", "Checkpoints and the exported model", make_checkpoint_keys},
      RecipeSectionInfo{"log", "Logs and metrics", make_log_keys},
      RecipeSectionInfo{"comm", "Communication between the ranks", make_comm_keys},
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
