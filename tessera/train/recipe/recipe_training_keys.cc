// The keys of a recipe about training: optimizer, schedule, steps, precision, checkpoints, logs, communication.
#include "tessera/train/recipe/recipe_field.h"

namespace tessera::train {

std::vector<RecipeKey> make_optimizer_keys() {
  return {
      {.name = "name",
       .field = field_of<&OptimizerSection::name>,
       .help = "Which optimizer. adamw8bit: moments in 8 bits; muon: of matrices but embedding and head, AdamW of the "
               "rest",
       .allowed = {"adamw", "adamw8bit", "muon", "sgd"}},
      {.name = "lr",
       .field = field_of<&OptimizerSection::lr>,
       .help = "Learning rate after the warm-up",
       .range = {.minimum = 0},
       .aliases = {"policy.optimizer.kwargs.lr"}},
      {.name = "betas",
       .field = field_of<&OptimizerSection::betas>,
       .help = "AdamW's decay of first and second moment",
       .range = {.minimum = 0, .maximum = 1, .below_maximum = true},
       .count = 2,
       .aliases = {"policy.optimizer.kwargs.betas"}},
      {.name = "eps",
       .field = field_of<&OptimizerSection::eps>,
       .help = "AdamW's epsilon",
       .range = {.minimum = 0, .above_minimum = true},
       .aliases = {"policy.optimizer.kwargs.eps"}},
      {.name = "weight_decay",
       .field = field_of<&OptimizerSection::weight_decay>,
       .help = "AdamW: decoupled decay; SGD: added to the gradient; norms and biases have none",
       .range = {.minimum = 0},
       .aliases = {"policy.optimizer.kwargs.weight_decay"}},
      {.name = "max_grad_norm",
       .field = field_of<&OptimizerSection::max_grad_norm>,
       .help = "Gradients are scaled down to this norm; 0: never",
       .range = {.minimum = 0},
       .aliases = {"training.max_norm", "clip_grad_norm.max_norm", "policy.max_grad_norm"}},
      {.name = "master_weights",
       .field = field_of<&OptimizerSection::master_weights>,
       .help = "Parameters and optimizer state in float32 although model.dtype is bfloat16, which is then that of the "
               "exported model; false: all in bfloat16, half the memory, but small updates are rounded away"},
      {.name = "stochastic_rounding",
       .field = field_of<&OptimizerSection::stochastic_rounding>,
       .help = "With master_weights false and a bfloat16 model: parameters are rounded up or down at random, by "
               "train.seed, "
               "so that small updates count on average; optimizer state is float32"},
      {.name = "early_step_in_backward",
       .field = field_of<&OptimizerSection::early_step_in_backward>,
       .help = "Parameters are updated layer by layer in backward, and their gradients freed: less memory, the same "
               "bits; with max_grad_norm 0, AdamW or SGD, sharded data parallelism and one pipeline stage"},
      {.name = "groups",
       .field = field_of<&OptimizerSection::groups>,
       .help =
           "Parameters with settings of their own: a list of a pattern of names and any of lr, weight_decay, betas, "
           "eps, momentum, as in \"model.embed_tokens.* lr=1.0e-5 weight_decay=0\"; the first that fits counts"},
      {.name = "momentum",
       .field = field_of<&OptimizerSection::momentum>,
       .help = "Muon's",
       .range = {.minimum = 0, .maximum = 1, .below_maximum = true}},
      {.name = "nesterov", .field = field_of<&OptimizerSection::nesterov>, .help = "Muon looks one step ahead"},
      {.name = "ns_steps",
       .field = field_of<&OptimizerSection::ns_steps>,
       .help = "Muon's Newton-Schulz iterations",
       .unit = "iterations",
       .range = {.minimum = 1, .maximum = 99}},
      {.name = "adjust_lr_fn",
       .field = field_of<&OptimizerSection::adjust_lr_fn>,
       .help = "How Muon's rate depends on a matrix: match_rms_adamw, so that AdamW's lr and weight_decay suit it, or "
               "original",
       .allowed = {"original", "match_rms_adamw"}},

  };
}

std::vector<RecipeKey> make_schedule_keys() {
  return {
      {.name = "name",
       .field = field_of<&ScheduleSection::name>,
       .help = "How the learning rate falls after the warm-up; wsd: stays, and falls at the end",
       .allowed = {"cosine", "linear", "constant", "wsd"},
       .aliases = {"lr_scheduler.decay_type", "lr_scheduler.lr_decay_style"}},
      {.name = "warmup_steps",
       .field = field_of<&ScheduleSection::warmup_steps>,
       .help = "Linear rise from 0, at most train.steps; with train.epochs, cut to the steps that there are",
       .unit = "steps",
       .range = kFromZero,
       .aliases = {"lr_scheduler.warmup_steps", "lr_scheduler.lr_warmup_steps"}},
      {.name = "min_lr_ratio",
       .field = field_of<&ScheduleSection::min_lr_ratio>,
       .help = "Last learning rate over the highest",
       .range = {.minimum = 0, .maximum = 1},
       .aliases = {"lr_scheduler.min_lr_factor"}},
      {.name = "decay_steps",
       .field = field_of<&ScheduleSection::decay_steps>,
       .help = "With wsd: the last steps, in which the rate falls; null: decay_ratio says how many",
       .unit = "steps",
       .range = kFromZero,
       .aliases = {"lr_scheduler.wsd_decay_steps"}},
      {.name = "decay_ratio",
       .field = field_of<&ScheduleSection::decay_ratio>,
       .help = "With wsd: the share of all steps in which the rate falls",
       .range = {.minimum = 0, .maximum = 1},
       .aliases = {"lr_scheduler.decay_ratio"}},
      {.name = "decay_type",
       .field = field_of<&ScheduleSection::decay_type>,
       .help = "With wsd: how it falls",
       .allowed = {"cosine", "linear", "1-sqrt"},
       .aliases = {"lr_scheduler.lr_wsd_decay_style"}},
  };
}

std::vector<RecipeKey> make_train_keys() {
  return {
      {.name = "steps",
       .field = field_of<&TrainSection::steps>,
       .help = "Optimizer steps; null with epochs",
       .unit = "steps",
       .range = kFromOne,
       .aliases = {"training.steps", "step_scheduler.max_steps", "sft.max_num_steps"}},
      {.name = "epochs",
       .field = field_of<&TrainSection::epochs>,
       .help = "Passes over data.train, instead of steps; the last step takes the rows that are left, however few",
       .unit = "epochs",
       .range = kFromOne,
       .aliases = {"step_scheduler.num_epochs", "sft.max_num_epochs"}},
      {.name = "global_batch_size",
       .field = field_of<&TrainSection::global_batch_size>,
       .help = "Sequences of one optimizer step, over all ranks",
       .unit = "sequences",
       .range = {.minimum = 1, .maximum = 1 << 30},
       .aliases = {"training.global_batch_size", "step_scheduler.global_batch_size", "policy.train_global_batch_size"}},
      {.name = "local_batch_size",
       .field = field_of<&TrainSection::local_batch_size>,
       .help = "Sequences of one forward pass on a rank; under pp a micro-batch",
       .unit = "sequences",
       .range = {.minimum = 1, .maximum = 1 << 30},
       .aliases = {"training.local_batch_size", "training.batch_size", "step_scheduler.local_batch_size",
                   "policy.train_micro_batch_size"}},
      {.name = "seed",
       .field = field_of<&TrainSection::seed>,
       .help = "Of data order, initialisation and dropout",
       .range = kFromZero,
       .aliases = {"training.seed", "debug.seed", "rng.seed", "sft.seed"}},
      {.name = "device",
       .field = field_of<&TrainSection::device>,
       .help = "auto (an accelerator where every rank has one, else the CPU), cpu, cuda, cuda:N, or the name of an "
               "accelerator that a library registered with libtorch",
       .aliases = {"device"}},
      {.name = "deterministic",
       .field = field_of<&TrainSection::deterministic>,
       .help = "The same bits in each run of a layout, on accelerators too: their kernels add up in one order",
       .aliases = {"training.deterministic", "debug.deterministic"}},
      {.name = "layer_graphs",
       .field = field_of<&TrainSection::layer_graphs>,
       .help = "On an accelerator forward and backward of a layer become one launch each (CUDA graphs), where shapes "
               "of batches repeat and rows are one document each or computed in 16 bits; costs the layers' activations "
               "all the time. Without tp, cp, experts, fp8 and adapters that drop"},
      {.name = "on_nonfinite",
       .field = field_of<&TrainSection::on_nonfinite>,
       .help = "Loss, gradient norm or validation loss is NaN or infinite: stop the run, or skip the step and go on",
       .allowed = {"stop", "skip"}},
      {.name = "validate_every",
       .field = field_of<&TrainSection::validate_every>,
       .help = "Held-out loss, also before and after the run; 0: never",
       .unit = "steps",
       .range = kFromZero,
       .aliases = {"validation.freq", "step_scheduler.val_every_steps", "sft.val_period"}},
      {.name = "early_stopping.patience",
       .field = field_of<&TrainSection::early_stopping_patience>,
       .help = "So many validations in a row without a lower loss end the run, which saves and exports; 0: never",
       .unit = "validations",
       .range = {.minimum = 0, .maximum = 1e9}},
      {.name = "early_stopping.min_delta",
       .field = field_of<&TrainSection::early_stopping_min_delta>,
       .help = "How much lower a loss must be to count as lower",
       .range = {.minimum = 0}},
      {.name = "sample_every",
       .field = field_of<&TrainSection::sample_every>,
       .help = "Print a greedy generation from the start of the first held-out (else training) row; 0: never",
       .unit = "steps",
       .range = kFromZero},
      {.name = "profile",
       .field = field_of<&TrainSection::profile>,
       .help =
           "Each rank writes a trace of three steps, behind three to warm up, into dir/profile; tessera report shows "
           "its summary",
       .aliases = {"profiling.enable_profiling"}},
      {.name = "page",
       .field = field_of<&TrainSection::page>,
       .help =
           "Port on the loopback of rank 0's host where the page of tessera report grows with the run, open to all who "
           "are logged in there; 0: none",
       .range = {.minimum = 0, .maximum = 65535}},

  };
}

std::vector<RecipeKey> make_precision_keys() {
  return {
      {.name = "param",
       .field = field_of<&PrecisionSection::param>,
       .help = "Compute dtype: parameters are gathered in it",
       .allowed = kDtypes,
       .aliases = {"training.mixed_precision_param"}},
      {.name = "reduce",
       .field = field_of<&PrecisionSection::reduce>,
       .help = "Gradients are reduced in it",
       .allowed = kDtypes,
       .aliases = {"training.mixed_precision_reduce"}},
      {.name = "output",
       .field = field_of<&PrecisionSection::output>,
       .help = "Logits are cast to it",
       .allowed = kDtypes},
      {.name = "fp8",
       .field = field_of<&PrecisionSection::fp8>,
       .help = "Linears of the layers, but not the head, multiply in float8 with a scale for each tensor (torchao's "
               "tensorwise recipe). A device without such products, as the CPU, computes their values in float32. Not "
               "with tp or model.lora",
       .aliases = {"float8.enable_float8_linear"}},
  };
}

std::vector<RecipeKey> make_checkpoint_keys() {
  return {
      {.name = "dir",
       .field = field_of<&CheckpointSection::dir>,
       .help = "The run's folder; RECIPE-NAME stands for the recipe file's name",
       .required = true,
       .aliases = {"checkpoint.folder", "checkpoint.checkpoint_dir", "checkpointing.checkpoint_dir"}},
      {.name = "every",
       .field = field_of<&CheckpointSection::every>,
       .help = "Steps between checkpoints, and one at the end; 0: none but when asked to stop",
       .unit = "steps",
       .range = kFromZero,
       .aliases = {"checkpoint.interval", "step_scheduler.ckpt_every_steps", "checkpointing.save_period"}},
      {.name = "keep_last",
       .field = field_of<&CheckpointSection::keep_last>,
       .help = "How many of the checkpoints published last stay",
       .unit = "checkpoints",
       .range = {.minimum = 1, .maximum = 1e6},
       .aliases = {"checkpoint.keep_latest_k", "checkpoint.max_recent_checkpoints"}},
      {.name = "keep_best",
       .field = field_of<&CheckpointSection::keep_best>,
       .help = "Checkpoints with the lowest validation loss that stay; more than 0 validates before each save",
       .unit = "checkpoints",
       .range = {.minimum = 0, .maximum = 1e6},
       .aliases = {"checkpointing.keep_top_k"}},
      {.name = "async",
       .field = field_of<&CheckpointSection::async>,
       .help = "Training may go on while a checkpoint is written",
       .aliases = {"checkpoint.is_async"}},
      {.name = "resume",
       .field = field_of<&CheckpointSection::resume>,
       .help =
           "auto: from the checkpoint published last in dir, if there is one; never: what is in dir is put aside into "
           "dir/previous; or the folder of a checkpoint, or of a run (its newest)",
       .required = true},
      {.name = "export",
       .field = field_of<&CheckpointSection::export_model>,
       .help = "When to write a Hugging Face folder",
       .allowed = {"final", "every", "never"},
       .aliases = {"checkpoint.save_consolidated"}},

  };
}

std::vector<RecipeKey> make_log_keys() {
  return {
      {.name = "every",
       .field = field_of<&LogSection::every>,
       .help = "Line on stderr; 0: never",
       .unit = "steps",
       .range = kFromZero,
       .aliases = {"metrics.log_freq"}},
      {.name = "tensorboard",
       .field = field_of<&LogSection::tensorboard>,
       .help = "Event files in dir/tensorboard",
       .aliases = {"metrics.enable_tensorboard", "logger.tensorboard_enabled"}},
      {.name = "jsonl", .field = field_of<&LogSection::jsonl>, .help = "One JSON object a step in dir/metrics.jsonl"},

  };
}

std::vector<RecipeKey> make_comm_keys() {
  return {
      {.name = "backend",
       .field = field_of<&CommSection::backend>,
       .help = "What carries collectives; auto chooses by host and device",
       .allowed = {"auto", "shm", "gloo", "nccl"},
       .aliases = {"dist_env.backend"}},
      {.name = "timeout_seconds",
       .field = field_of<&CommSection::timeout_seconds>,
       .help = "A collective that takes longer fails",
       .unit = "seconds",
       .range = {.minimum = 1, .maximum = 604800},
       .aliases = {"comm.train_timeout_seconds", "comm.init_timeout_seconds"}},
      {.name = "check",
       .field = field_of<&CommSection::check>,
       .help = "When ranks compare what they called: never, at a timeout, or before each collective",
       .allowed = {"off", "timeout", "always"}},
      {.name = "high_priority_streams",
       .field = field_of<&CommSection::high_priority_streams>,
       .help = "On accelerators collectives come before what computes, where both are ready"},
      {.name = "split_groups",
       .field = field_of<&CommSection::split_groups>,
       .help =
           "Over NCCL the groups of a mesh's dims are split from the world's communicator, a second group of the same "
           "ranks from the first one's"},
  };
}

}  // namespace tessera::train
