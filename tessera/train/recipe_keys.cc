// Every section and key of a recipe: what it is, what it takes, what it is by default.
#include <array>

#include "tessera/train/recipe_schema.h"

namespace tessera::train {
namespace {

template <auto Section, auto Member>
FieldRef field(Recipe& recipe) {
  return &((recipe.*Section).*Member);
}

template <auto Member>
constexpr auto kModel = &field<&Recipe::model, Member>;
template <auto Member>
constexpr auto kLora = &field<&Recipe::lora, Member>;
template <auto Member>
constexpr auto kData = &field<&Recipe::data, Member>;
template <auto Member>
constexpr auto kParallel = &field<&Recipe::parallel, Member>;
template <auto Member>
constexpr auto kOptimizer = &field<&Recipe::optimizer, Member>;
template <auto Member>
constexpr auto kSchedule = &field<&Recipe::schedule, Member>;
template <auto Member>
constexpr auto kTrain = &field<&Recipe::train, Member>;
template <auto Member>
constexpr auto kPrecision = &field<&Recipe::precision, Member>;
template <auto Member>
constexpr auto kCheckpoint = &field<&Recipe::checkpoint, Member>;
template <auto Member>
constexpr auto kLog = &field<&Recipe::log, Member>;
template <auto Member>
constexpr auto kComm = &field<&Recipe::comm, Member>;

constexpr Range kFromZero{.minimum = 0, .maximum = 1e15};
constexpr Range kFromOne{.minimum = 1, .maximum = 1e15};
constexpr Range kDimension{.minimum = -1, .maximum = 1 << 24, .without_zero = true};
const std::vector<const char*> kDtypes{"float32", "bfloat16"};

std::vector<RecipeKey> make_model_keys() {
  return {
      {.section = "model",
       .name = "path",
       .field = kModel<&ModelSection::path>,
       .help = "Hugging Face folder: config.json, safetensors, tokenizer.json",
       .required = true,
       .aliases = {"model.hf_assets_path", "model.pretrained_model_name_or_path", "policy.model_name"}},
      {.section = "model",
       .name = "weights",
       .field = kModel<&ModelSection::weights>,
       .help = "Start from these weights instead of those in model.path: a run's or PyTorch's distributed checkpoint, "
               "safetensors, a torch.save file",
       .aliases = {"checkpoint.initial_load_path"}},
      {.section = "model",
       .name = "dtype",
       .field = kModel<&ModelSection::dtype>,
       .help = "Dtype of the exported model; while training parameters have it too without optimizer.master_weights",
       .allowed = kDtypes,
       .aliases = {"training.dtype", "model.torch_dtype"}},
      {.section = "model",
       .name = "init",
       .field = kModel<&ModelSection::init>,
       .help = "pretrained reads the weights; random needs config.json only",
       .allowed = {"pretrained", "random"}},
  };
}

std::vector<RecipeKey> make_data_keys() {
  return {
      {.section = "data",
       .name = "train",
       .field = kData<&DataSection::train>,
       .help = "Files to train on, one path or a list",
       .required = true,
       .aliases = {"training.dataset_path", "dataset.path_or_dataset_id"}},
      {.section = "data",
       .name = "validation",
       .field = kData<&DataSection::validation>,
       .help = "Held-out files; empty: no validation",
       .aliases = {"validation.dataset_path", "validation_dataset.path_or_dataset_id"}},
      {.section = "data",
       .name = "format",
       .field = kData<&DataSection::format>,
       .help = "auto looks at the files; jsonl: text, or prompt and completion; chat: messages",
       .allowed = {"auto", "text", "jsonl", "chat"}},
      {.section = "data",
       .name = "sequence_length",
       .field = kData<&DataSection::sequence_length>,
       .help = "Length of one sequence",
       .unit = "tokens",
       .range = {.minimum = 2, .maximum = 1 << 24},
       .aliases = {"training.seq_len", "dataset.seq_length", "packed_sequence.packed_sequence_size",
                   "policy.max_total_sequence_length"}},
      {.section = "data",
       .name = "packing",
       .field = kData<&DataSection::packing>,
       .help = "Several documents in one sequence, each seeing only itself",
       .aliases = {"policy.sequence_packing.enabled"}},
      {.section = "data",
       .name = "overlong",
       .field = kData<&DataSection::overlong>,
       .help = "What becomes of a sample longer than sequence_length",
       .allowed = {"truncate", "drop", "error"}},
  };
}

std::vector<RecipeKey> make_lora_keys() {
  return {
      {.section = "model",
       .name = "lora.rank",
       .field = kLora<&LoraSection::rank>,
       .help = "Train adapters of this rank and leave the model as it is; 0: train the model",
       .range = {.minimum = 0, .maximum = 1 << 20},
       .aliases = {"lora.rank", "peft.dim", "policy.dtensor_cfg.lora_cfg.dim"}},
      {.section = "model",
       .name = "lora.alpha",
       .field = kLora<&LoraSection::alpha>,
       .help = "Adapters count alpha / rank times",
       .range = {.minimum = 0, .maximum = 1e9, .above_minimum = true},
       .aliases = {"lora.alpha", "peft.alpha", "policy.dtensor_cfg.lora_cfg.alpha"}},
      {.section = "model",
       .name = "lora.dropout",
       .field = kLora<&LoraSection::dropout>,
       .help = "Share of an adapter's inputs that is dropped while training, by train.seed and the place in the data",
       .range = {.minimum = 0, .maximum = 1, .below_maximum = true},
       .aliases = {"lora.dropout", "peft.dropout", "policy.dtensor_cfg.lora_cfg.dropout"}},
      {.section = "model",
       .name = "lora.targets",
       .field = kLora<&LoraSection::target_modules>,
       .help =
           "Which linear layers have adapters: names (q_proj), regular expressions of the whole path, or all-linear",
       .aliases = {"lora.target_modules", "peft.target_modules", "policy.dtensor_cfg.lora_cfg.target_modules"}},
      {.section = "model",
       .name = "lora.rslora",
       .field = kLora<&LoraSection::rslora>,
       .help = "Adapters count alpha / sqrt(rank) times",
       .aliases = {"lora.rslora"}},
      {.section = "model",
       .name = "lora.dora",
       .field = kLora<&LoraSection::dora>,
       .help = "DoRA: the norm of each row of an adapted weight is learnt, too",
       .aliases = {"lora.dora", "peft.use_dora"}},
      {.section = "model",
       .name = "lora.path",
       .field = kLora<&LoraSection::path>,
       .help = "Start from the adapters in this folder of PEFT's; rank, alpha, targets, rslora and dora are "
               "theirs then",
       .aliases = {"lora.path"}},
      {.section = "model",
       .name = "lora.merge",
       .field = kLora<&LoraSection::merge>,
       .help = "Export the model with its adapters added; false: the adapters, as PEFT saves them",
       .aliases = {"lora.merge"}},
      {.section = "model",
       .name = "lora.quantize",
       .field = kLora<&LoraSection::quantize>,
       .help = "Keep the model in 4 bits beside its adapters"},
  };
}

std::vector<RecipeKey> make_parallel_keys() {
  return {
      {.section = "parallel",
       .name = "dp_replicate",
       .field = kParallel<&ParallelSection::dp_replicate>,
       .help = "Replicas of the sharded model, or with dp_shard 1 of the whole one (DDP); -1: what is left",
       .unit = "ranks",
       .range = kDimension,
       .aliases = {"parallelism.data_parallel_replicate_degree", "distributed.dp_replicate_size"}},
      {.section = "parallel",
       .name = "dp_shard",
       .field = kParallel<&ParallelSection::dp_shard>,
       .help = "FSDP: ranks that share one copy of parameters and optimizer; -1: what is left",
       .unit = "ranks",
       .range = kDimension,
       .aliases = {"parallelism.data_parallel_shard_degree"}},
      {.section = "parallel",
       .name = "tp",
       .field = kParallel<&ParallelSection::tp>,
       .help = "Tensor parallelism: ranks that share heads, inner widths and vocabulary; -1: what is left",
       .unit = "ranks",
       .range = kDimension,
       .aliases = {"parallelism.tensor_parallel_degree", "distributed.tp_size",
                   "policy.dtensor_cfg.tensor_parallel_size"}},
      {.section = "parallel",
       .name = "cp",
       .field = kParallel<&ParallelSection::cp>,
       .help = "Context parallelism: ranks that share the tokens of each sequence; -1: what is left",
       .unit = "ranks",
       .range = kDimension,
       .aliases = {"parallelism.context_parallel_degree", "distributed.cp_size",
                   "policy.dtensor_cfg.context_parallel_size"}},
      {.section = "parallel",
       .name = "pp",
       .field = kParallel<&ParallelSection::pp>,
       .help = "Pipeline parallelism: ranks that share the layers; -1: what is left",
       .unit = "ranks",
       .range = kDimension,
       .aliases = {"parallelism.pipeline_parallel_degree", "distributed.pp_size"}},
      {.section = "parallel",
       .name = "ep",
       .field = kParallel<&ParallelSection::ep>,
       .help = "Expert parallelism; takes no ranks of its own, divides dp x cp x tp",
       .unit = "ranks",
       .range = {.minimum = 1, .maximum = 1 << 24},
       .aliases = {"parallelism.expert_parallel_degree", "distributed.ep_size"}},
      {.section = "parallel",
       .name = "schedule",
       .field = kParallel<&ParallelSection::schedule>,
       .help = "With pp: in which order a rank takes the micro-batches. The last five give each rank several stages",
       .allowed = {"1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble",
                   "DualPipeV"},
       .aliases = {"parallelism.pipeline_parallel_schedule", "distributed.pipeline.pp_schedule"}},
      {.section = "parallel",
       .name = "layers_per_stage",
       .field = kParallel<&ParallelSection::layers_per_stage>,
       .help = "With pp: layers of a stage, which gives the number of stages; null: one stage a rank, or two where the "
               "schedule wants several",
       .unit = "layers",
       .range = {.minimum = 1, .maximum = 1 << 24},
       .aliases = {"parallelism.pipeline_parallel_layers_per_stage", "distributed.pipeline.layers_per_stage"}},
      {.section = "parallel",
       .name = "cp_rotate_method",
       .field = kParallel<&ParallelSection::cp_rotate_method>,
       .help = "With cp: all keys and values are gathered at once (allgather), or go around the ranks beside the "
               "products (alltoall), which keeps less in memory",
       .allowed = {"allgather", "alltoall"},
       .aliases = {"parallelism.context_parallel_rotate_method"}},
      {.section = "parallel",
       .name = "sequence_parallel",
       .field = kParallel<&ParallelSection::sequence_parallel>,
       .help = "Shard activations between tensor-parallel blocks along the sequence",
       .aliases = {"distributed.sequence_parallel", "policy.dtensor_cfg.sequence_parallel"}},
      {.section = "parallel",
       .name = "activation_checkpointing",
       .field = kParallel<&ParallelSection::activation_checkpointing>,
       .help = "Compute activations again in backward instead of keeping them: those of each layer's MLP (mlp, or "
               "true), of "
               "each layer (full), or of each layer but attention and every second product (selective)",
       .allowed = {"none", "mlp", "selective", "full", "true", "false"},
       .aliases = {"activation_checkpoint.mode"}},
      {.section = "parallel",
       .name = "cpu_offload",
       .field = kParallel<&ParallelSection::cpu_offload>,
       .help = "Keep shards, gradients and optimizer state in host memory; on CPUs they are there anyway",
       .aliases = {"training.enable_cpu_offload", "policy.dtensor_cfg.cpu_offload"}},
      {.section = "parallel",
       .name = "defer_gradient_sync",
       .field = kParallel<&ParallelSection::defer_gradient_sync>,
       .help =
           "FSDP: reduce gradients once a step, not after each micro-batch; less traffic, but every rank then holds "
           "them whole, in precision.reduce",
       .aliases = {"distributed.defer_fsdp_grad_sync"}},
      {.section = "parallel",
       .name = "plan",
       .field = kParallel<&ParallelSection::plan>,
       .help = "How tp shards the model. auto: the family's own plan; hf: transformers' plan; or a YAML file, from "
               "pattern of "
               "modules to style",
       .aliases = {"policy.dtensor_cfg.custom_parallel_plan"}},
      {.section = "parallel",
       .name = "replicate_kv",
       .field = kParallel<&ParallelSection::replicate_kv>,
       .help = "With fewer key-value heads than tp, a multiple of them: every rank keeps their projections whole"},
  };
}

std::vector<RecipeKey> make_optimizer_and_schedule_keys() {
  return {
      {.section = "optimizer",
       .name = "name",
       .field = kOptimizer<&OptimizerSection::name>,
       .help = "Which optimizer. adamw8bit: moments in 8 bits; muon: of matrices but embedding and head, AdamW of the "
               "rest",
       .allowed = {"adamw", "adamw8bit", "muon", "sgd"}},
      {.section = "optimizer",
       .name = "lr",
       .field = kOptimizer<&OptimizerSection::lr>,
       .help = "Learning rate after the warm-up",
       .range = {.minimum = 0},
       .aliases = {"policy.optimizer.kwargs.lr"}},
      {.section = "optimizer",
       .name = "betas",
       .field = kOptimizer<&OptimizerSection::betas>,
       .help = "AdamW's decay of first and second moment",
       .range = {.minimum = 0, .maximum = 1, .below_maximum = true},
       .count = 2,
       .aliases = {"policy.optimizer.kwargs.betas"}},
      {.section = "optimizer",
       .name = "eps",
       .field = kOptimizer<&OptimizerSection::eps>,
       .help = "AdamW's epsilon",
       .range = {.minimum = 0, .above_minimum = true},
       .aliases = {"policy.optimizer.kwargs.eps"}},
      {.section = "optimizer",
       .name = "weight_decay",
       .field = kOptimizer<&OptimizerSection::weight_decay>,
       .help = "AdamW: decoupled decay; SGD: added to the gradient; norms and biases have none",
       .range = {.minimum = 0},
       .aliases = {"policy.optimizer.kwargs.weight_decay"}},
      {.section = "optimizer",
       .name = "max_grad_norm",
       .field = kOptimizer<&OptimizerSection::max_grad_norm>,
       .help = "Gradients are scaled down to this norm; 0: never",
       .range = {.minimum = 0},
       .aliases = {"training.max_norm", "clip_grad_norm.max_norm", "policy.max_grad_norm"}},
      {.section = "optimizer",
       .name = "master_weights",
       .field = kOptimizer<&OptimizerSection::master_weights>,
       .help = "Parameters and optimizer state in float32 although model.dtype is bfloat16, which is then that of the "
               "exported model; false: all in bfloat16, half the memory, but small updates are rounded away"},
      {.section = "optimizer",
       .name = "stochastic_rounding",
       .field = kOptimizer<&OptimizerSection::stochastic_rounding>,
       .help = "With master_weights false and a bfloat16 model: parameters are rounded up or down at random, by "
               "train.seed, "
               "so that small updates count on average; optimizer state is float32"},
      {.section = "optimizer",
       .name = "groups",
       .field = kOptimizer<&OptimizerSection::groups>,
       .help =
           "Parameters with settings of their own: a list of a pattern of names and any of lr, weight_decay, betas, "
           "eps, momentum, as in \"model.embed_tokens.* lr=1.0e-5 weight_decay=0\"; the first that fits counts"},
      {.section = "optimizer",
       .name = "momentum",
       .field = kOptimizer<&OptimizerSection::momentum>,
       .help = "Muon's",
       .range = {.minimum = 0, .maximum = 1, .below_maximum = true}},
      {.section = "optimizer",
       .name = "nesterov",
       .field = kOptimizer<&OptimizerSection::nesterov>,
       .help = "Muon looks one step ahead"},
      {.section = "optimizer",
       .name = "ns_steps",
       .field = kOptimizer<&OptimizerSection::ns_steps>,
       .help = "Muon's Newton-Schulz iterations",
       .unit = "iterations",
       .range = {.minimum = 1, .maximum = 99}},
      {.section = "optimizer",
       .name = "adjust_lr_fn",
       .field = kOptimizer<&OptimizerSection::adjust_lr_fn>,
       .help = "How Muon's rate depends on a matrix: match_rms_adamw, so that AdamW's lr and weight_decay suit it, or "
               "original",
       .allowed = {"original", "match_rms_adamw"}},

      {.section = "schedule",
       .name = "name",
       .field = kSchedule<&ScheduleSection::name>,
       .help = "How the learning rate falls after the warm-up; wsd: stays, and falls at the end",
       .allowed = {"cosine", "linear", "constant", "wsd"},
       .aliases = {"lr_scheduler.decay_type", "lr_scheduler.lr_decay_style"}},
      {.section = "schedule",
       .name = "warmup_steps",
       .field = kSchedule<&ScheduleSection::warmup_steps>,
       .help = "Linear rise from 0, at most train.steps",
       .unit = "steps",
       .range = kFromZero,
       .aliases = {"lr_scheduler.warmup_steps", "lr_scheduler.lr_warmup_steps"}},
      {.section = "schedule",
       .name = "min_lr_ratio",
       .field = kSchedule<&ScheduleSection::min_lr_ratio>,
       .help = "Last learning rate over the highest",
       .range = {.minimum = 0, .maximum = 1},
       .aliases = {"lr_scheduler.min_lr_factor"}},
      {.section = "schedule",
       .name = "decay_steps",
       .field = kSchedule<&ScheduleSection::decay_steps>,
       .help = "With wsd: the last steps, in which the rate falls; null: decay_ratio says how many",
       .unit = "steps",
       .range = kFromZero,
       .aliases = {"lr_scheduler.wsd_decay_steps"}},
      {.section = "schedule",
       .name = "decay_ratio",
       .field = kSchedule<&ScheduleSection::decay_ratio>,
       .help = "With wsd: the share of all steps in which the rate falls",
       .range = {.minimum = 0, .maximum = 1},
       .aliases = {"lr_scheduler.decay_ratio"}},
      {.section = "schedule",
       .name = "decay_type",
       .field = kSchedule<&ScheduleSection::decay_type>,
       .help = "With wsd: how it falls",
       .allowed = {"cosine", "linear", "1-sqrt"},
       .aliases = {"lr_scheduler.lr_wsd_decay_style"}},
  };
}

std::vector<RecipeKey> make_train_and_precision_keys() {
  return {
      {.section = "train",
       .name = "steps",
       .field = kTrain<&TrainSection::steps>,
       .help = "Optimizer steps; null with epochs",
       .unit = "steps",
       .range = kFromOne,
       .aliases = {"training.steps", "step_scheduler.max_steps", "sft.max_num_steps"}},
      {.section = "train",
       .name = "epochs",
       .field = kTrain<&TrainSection::epochs>,
       .help = "Passes over data.train, instead of steps",
       .unit = "epochs",
       .range = kFromOne,
       .aliases = {"step_scheduler.num_epochs", "sft.max_num_epochs"}},
      {.section = "train",
       .name = "global_batch_size",
       .field = kTrain<&TrainSection::global_batch_size>,
       .help = "Sequences of one optimizer step, over all ranks",
       .unit = "sequences",
       .range = {.minimum = 1, .maximum = 1 << 30},
       .aliases = {"training.global_batch_size", "step_scheduler.global_batch_size", "policy.train_global_batch_size"}},
      {.section = "train",
       .name = "local_batch_size",
       .field = kTrain<&TrainSection::local_batch_size>,
       .help = "Sequences of one forward pass on a rank; under pp a micro-batch",
       .unit = "sequences",
       .range = {.minimum = 1, .maximum = 1 << 30},
       .aliases = {"training.local_batch_size", "training.batch_size", "step_scheduler.local_batch_size",
                   "policy.train_micro_batch_size"}},
      {.section = "train",
       .name = "seed",
       .field = kTrain<&TrainSection::seed>,
       .help = "Of data order, initialisation and dropout",
       .range = kFromZero,
       .aliases = {"training.seed", "debug.seed", "rng.seed", "sft.seed"}},
      {.section = "train",
       .name = "deterministic",
       .field = kTrain<&TrainSection::deterministic>,
       .help = "The same bits for any data-parallel size",
       .available = {"false"},
       .aliases = {"training.deterministic", "debug.deterministic"}},
      {.section = "train",
       .name = "on_nonfinite",
       .field = kTrain<&TrainSection::on_nonfinite>,
       .help = "Loss or gradient norm is NaN or infinite: stop the run or skip the step",
       .allowed = {"stop", "skip"}},
      {.section = "train",
       .name = "validate_every",
       .field = kTrain<&TrainSection::validate_every>,
       .help = "Held-out loss, also before and after the run; 0: never",
       .unit = "steps",
       .range = kFromZero,
       .aliases = {"validation.freq", "step_scheduler.val_every_steps", "sft.val_period"}},
      {.section = "train",
       .name = "early_stopping.patience",
       .field = kTrain<&TrainSection::early_stopping_patience>,
       .help = "So many validations in a row without a lower loss end the run, which saves and exports; 0: never",
       .unit = "validations",
       .range = {.minimum = 0, .maximum = 1e9}},
      {.section = "train",
       .name = "early_stopping.min_delta",
       .field = kTrain<&TrainSection::early_stopping_min_delta>,
       .help = "How much lower a loss must be to count as lower",
       .range = {.minimum = 0}},
      {.section = "train",
       .name = "sample_every",
       .field = kTrain<&TrainSection::sample_every>,
       .help = "Print a greedy generation from the start of the first held-out (else training) row; 0: never",
       .unit = "steps",
       .range = kFromZero},
      {.section = "train",
       .name = "profile",
       .field = kTrain<&TrainSection::profile>,
       .help = "Write a trace of some steps",
       .available = {"false"},
       .aliases = {"profiling.enable_profiling"}},

      {.section = "precision",
       .name = "param",
       .field = kPrecision<&PrecisionSection::param>,
       .help = "Compute dtype: parameters are gathered in it",
       .allowed = kDtypes,
       .aliases = {"training.mixed_precision_param"}},
      {.section = "precision",
       .name = "reduce",
       .field = kPrecision<&PrecisionSection::reduce>,
       .help = "Gradients are reduced in it",
       .allowed = kDtypes,
       .aliases = {"training.mixed_precision_reduce"}},
      {.section = "precision",
       .name = "output",
       .field = kPrecision<&PrecisionSection::output>,
       .help = "Logits are cast to it",
       .allowed = kDtypes},
  };
}

std::vector<RecipeKey> make_run_keys() {
  return {
      {.section = "checkpoint",
       .name = "dir",
       .field = kCheckpoint<&CheckpointSection::dir>,
       .help = "The run's folder; RECIPE-NAME stands for the recipe file's name",
       .required = true,
       .aliases = {"checkpoint.folder", "checkpoint.checkpoint_dir", "checkpointing.checkpoint_dir"}},
      {.section = "checkpoint",
       .name = "every",
       .field = kCheckpoint<&CheckpointSection::every>,
       .help = "Steps between checkpoints, and one at the end; 0: none but when asked to stop",
       .unit = "steps",
       .range = kFromZero,
       .aliases = {"checkpoint.interval", "step_scheduler.ckpt_every_steps", "checkpointing.save_period"}},
      {.section = "checkpoint",
       .name = "keep_last",
       .field = kCheckpoint<&CheckpointSection::keep_last>,
       .help = "How many of the checkpoints published last stay",
       .unit = "checkpoints",
       .range = {.minimum = 1, .maximum = 1e6},
       .aliases = {"checkpoint.keep_latest_k", "checkpoint.max_recent_checkpoints"}},
      {.section = "checkpoint",
       .name = "keep_best",
       .field = kCheckpoint<&CheckpointSection::keep_best>,
       .help = "Checkpoints with the lowest validation loss that stay; more than 0 validates before each save",
       .unit = "checkpoints",
       .range = {.minimum = 0, .maximum = 1e6},
       .aliases = {"checkpointing.keep_top_k"}},
      {.section = "checkpoint",
       .name = "async",
       .field = kCheckpoint<&CheckpointSection::async>,
       .help = "Training may go on while a checkpoint is written",
       .aliases = {"checkpoint.is_async"}},
      {.section = "checkpoint",
       .name = "resume",
       .field = kCheckpoint<&CheckpointSection::resume>,
       .help =
           "auto: from the checkpoint published last in dir, if there is one; never: what is in dir is put aside into "
           "dir/previous; or the folder of a checkpoint",
       .required = true},
      {.section = "checkpoint",
       .name = "export",
       .field = kCheckpoint<&CheckpointSection::export_model>,
       .help = "When to write a Hugging Face folder",
       .allowed = {"final", "every", "never"},
       .aliases = {"checkpoint.save_consolidated"}},

      {.section = "log",
       .name = "every",
       .field = kLog<&LogSection::every>,
       .help = "Line on stderr; 0: never",
       .unit = "steps",
       .range = kFromZero,
       .aliases = {"metrics.log_freq"}},
      {.section = "log",
       .name = "tensorboard",
       .field = kLog<&LogSection::tensorboard>,
       .help = "Event files in dir/tensorboard",
       .aliases = {"metrics.enable_tensorboard", "logger.tensorboard_enabled"}},
      {.section = "log",
       .name = "jsonl",
       .field = kLog<&LogSection::jsonl>,
       .help = "One JSON object a step in dir/metrics.jsonl"},

      {.section = "comm",
       .name = "backend",
       .field = kComm<&CommSection::backend>,
       .help = "What carries collectives; auto chooses by host and device",
       .allowed = {"auto", "shm", "gloo", "nccl"},
       .aliases = {"dist_env.backend"}},
      {.section = "comm",
       .name = "timeout_seconds",
       .field = kComm<&CommSection::timeout_seconds>,
       .help = "A collective that takes longer fails",
       .unit = "seconds",
       .range = {.minimum = 1, .maximum = 604800},
       .aliases = {"comm.train_timeout_seconds", "comm.init_timeout_seconds"}},
      {.section = "comm",
       .name = "check",
       .field = kComm<&CommSection::check>,
       .help = "When ranks compare what they called: never, at a timeout, or before each collective",
       .allowed = {"off", "timeout", "always"}},
  };
}

}  // namespace

std::span<const RecipeSectionInfo> recipe_sections() {
  static constexpr std::array kSections{
      RecipeSectionInfo{"model", "What is trained"},
      RecipeSectionInfo{"data", "What it is trained on"},
      RecipeSectionInfo{"parallel", "How it is spread over ranks"},
      RecipeSectionInfo{"optimizer", "How parameters move"},
      RecipeSectionInfo{"schedule", "The learning rate over time"},
      RecipeSectionInfo{"train", "How long, in which batches"},
      RecipeSectionInfo{"precision", "Dtypes of compute and communication"},
      RecipeSectionInfo{"checkpoint", "What is saved, where, how often"},
      RecipeSectionInfo{"log", "What is reported"},
      RecipeSectionInfo{"comm", "How ranks talk"},
  };
  return kSections;
}

std::span<const RecipeKey> recipe_keys() {
  static const std::vector<RecipeKey> kKeys = [] {
    std::vector<RecipeKey> keys;
    for (auto make : {&make_model_keys, &make_lora_keys, &make_data_keys, &make_parallel_keys,
                      &make_optimizer_and_schedule_keys, &make_train_and_precision_keys, &make_run_keys}) {
      for (auto& key : make()) keys.push_back(std::move(key));
    }
    return keys;
  }();
  return kKeys;
}

}  // namespace tessera::train
