// The keys of the sections optimizer, schedule, train, precision, checkpoint, log and comm of a recipe.
#include "tessera/train/recipe/recipe_field.h"

namespace tessera::train {

std::vector<RecipeKey> make_optimizer_keys() {
  return {
      {.name = "name",
       .field = field_of<&OptimizerSection::name>,
       .help = "Optimizer. adamw8bit: AdamW with moments in 8 bits; muon: Muon for matrices except embedding and head, "
               "AdamW for all other parameters",
       .allowed = {"adamw", "adamw8bit", "muon", "sgd"}},
      {.name = "lr",
       .field = field_of<&OptimizerSection::lr>,
       .help = "Learning rate after the warm-up",
       .range = {.minimum = 0},
       .aliases = {"policy.optimizer.kwargs.lr"}},
      {.name = "betas",
       .field = field_of<&OptimizerSection::betas>,
       .help = "AdamW's decay rates of the first and the second moment",
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
       .help = "AdamW: decoupled weight decay; SGD: added to the gradient; norms and biases have no decay",
       .range = {.minimum = 0},
       .aliases = {"policy.optimizer.kwargs.weight_decay"}},
      {.name = "max_grad_norm",
       .field = field_of<&OptimizerSection::max_grad_norm>,
       .help = "Clip the gradient norm to this value; 0: no clipping",
       .range = {.minimum = 0},
       .aliases = {"training.max_norm", "clip_grad_norm.max_norm", "policy.max_grad_norm"}},
      {.name = "master_weights",
       .field = field_of<&OptimizerSection::master_weights>,
       .help = "Keep parameters and optimizer state in float32 although model.dtype is bfloat16, which is then only "
               "the dtype of the exported model; false: all in bfloat16, half the memory, but small updates are lost "
               "by rounding"},
      {.name = "stochastic_rounding",
       .field = field_of<&OptimizerSection::stochastic_rounding>,
       .help = "With master_weights false and a bfloat16 model: round parameters up or down at random (seed: "
               "train.seed), so that small updates are kept on average; optimizer state is float32"},
      {.name = "early_step_in_backward",
       .field = field_of<&OptimizerSection::early_step_in_backward>,
       .help = "Update parameters layer by layer during backward and free their gradients at once: less memory, the "
               "same bits; needs max_grad_norm 0, AdamW or SGD, sharded data parallelism and one pipeline stage"},
      {.name = "groups",
       .field = field_of<&OptimizerSection::groups>,
       .help = "Parameters with their own settings: a list of texts, each a name pattern and any of lr, weight_decay, "
               "betas, eps, momentum, as in \"model.embed_tokens.* lr=1.0e-5 weight_decay=0\"; a parameter belongs to "
               "the first group whose pattern matches its name"},
      {.name = "momentum",
       .field = field_of<&OptimizerSection::momentum>,
       .help = "Momentum of Muon",
       .range = {.minimum = 0, .maximum = 1, .below_maximum = true}},
      {.name = "nesterov", .field = field_of<&OptimizerSection::nesterov>, .help = "Nesterov momentum in Muon"},
      {.name = "ns_steps",
       .field = field_of<&OptimizerSection::ns_steps>,
       .help = "Newton-Schulz iterations of Muon",
       .unit = "iterations",
       .range = {.minimum = 1, .maximum = 99}},
      {.name = "adjust_lr_fn",
       .field = field_of<&OptimizerSection::adjust_lr_fn>,
       .help = "How Muon scales the learning rate by the shape of a matrix: match_rms_adamw, so that lr and "
               "weight_decay of AdamW fit, or original",
       .allowed = {"original", "match_rms_adamw"}},

  };
}

std::vector<RecipeKey> make_schedule_keys() {
  return {
      {.name = "name",
       .field = field_of<&ScheduleSection::name>,
       .help = "Shape of the decay after the warm-up; wsd: constant, with a decay at the end",
       .allowed = {"cosine", "linear", "constant", "wsd"},
       .aliases = {"lr_scheduler.decay_type", "lr_scheduler.lr_decay_style"}},
      {.name = "warmup_steps",
       .field = field_of<&ScheduleSection::warmup_steps>,
       .help = "Linear warm-up from 0, at most train.steps; with train.epochs it is cut to the steps of the run",
       .unit = "steps",
       .range = kFromZero,
       .aliases = {"lr_scheduler.warmup_steps", "lr_scheduler.lr_warmup_steps"}},
      {.name = "min_lr_ratio",
       .field = field_of<&ScheduleSection::min_lr_ratio>,
       .help = "Final learning rate divided by the highest",
       .range = {.minimum = 0, .maximum = 1},
       .aliases = {"lr_scheduler.min_lr_factor"}},
      {.name = "decay_steps",
       .field = field_of<&ScheduleSection::decay_steps>,
       .help = "With wsd: steps at the end in which the rate decays; null: computed from decay_ratio",
       .unit = "steps",
       .range = kFromZero,
       .aliases = {"lr_scheduler.wsd_decay_steps"}},
      {.name = "decay_ratio",
       .field = field_of<&ScheduleSection::decay_ratio>,
       .help = "With wsd: fraction of all steps in which the rate decays",
       .range = {.minimum = 0, .maximum = 1},
       .aliases = {"lr_scheduler.decay_ratio"}},
      {.name = "decay_type",
       .field = field_of<&ScheduleSection::decay_type>,
       .help = "With wsd: shape of the decay",
       .allowed = {"cosine", "linear", "1-sqrt"},
       .aliases = {"lr_scheduler.lr_wsd_decay_style"}},
  };
}

std::vector<RecipeKey> make_train_keys() {
  return {
      {.name = "steps",
       .field = field_of<&TrainSection::steps>,
       .help = "Optimizer steps; null when epochs is set",
       .unit = "steps",
       .range = kFromOne,
       .aliases = {"training.steps", "step_scheduler.max_steps", "sft.max_num_steps"}},
      {.name = "epochs",
       .field = field_of<&TrainSection::epochs>,
       .help = "Passes over data.train, instead of steps; the last step may have fewer rows than the others",
       .unit = "epochs",
       .range = kFromOne,
       .aliases = {"step_scheduler.num_epochs", "sft.max_num_epochs"}},
      {.name = "global_batch_size",
       .field = field_of<&TrainSection::global_batch_size>,
       .help = "Sequences per optimizer step, over all ranks",
       .unit = "sequences",
       .range = {.minimum = 1, .maximum = 1 << 30},
       .aliases = {"training.global_batch_size", "step_scheduler.global_batch_size", "policy.train_global_batch_size"}},
      {.name = "local_batch_size",
       .field = field_of<&TrainSection::local_batch_size>,
       .help = "Sequences per forward pass on a rank; with pp, the sequences of a micro-batch",
       .unit = "sequences",
       .range = {.minimum = 1, .maximum = 1 << 30},
       .aliases = {"training.local_batch_size", "training.batch_size", "step_scheduler.local_batch_size",
                   "policy.train_micro_batch_size"}},
      {.name = "seed",
       .field = field_of<&TrainSection::seed>,
       .help = "Seed of data order, initialisation and dropout",
       .range = kFromZero,
       .aliases = {"training.seed", "debug.seed", "rng.seed", "sft.seed"}},
      {.name = "device",
       .field = field_of<&TrainSection::device>,
       .help = "auto (an accelerator if every rank has one, else the CPU), cpu, cuda, cuda:N, or the name of an "
               "accelerator that a library registered with libtorch",
       .aliases = {"device"}},
      {.name = "deterministic",
       .field = field_of<&TrainSection::deterministic>,
       .help = "The same bits in each run of a layout, on accelerators too: kernels sum in a fixed order",
       .aliases = {"training.deterministic", "debug.deterministic"}},
      {.name = "layer_graphs",
       .field = field_of<&TrainSection::layer_graphs>,
       .help = "On an accelerator, run forward and backward of a layer as one launch each (CUDA graphs), where batch "
               "shapes repeat and each row is one document or compute is in 16 bits; keeps the layers' activations "
               "allocated all the time. Not with tp, cp, experts, fp8 and adapter dropout"},
      {.name = "on_nonfinite",
       .field = field_of<&TrainSection::on_nonfinite>,
       .help = "When loss, gradient norm or validation loss is NaN or infinite: stop the run, or skip the step and "
               "continue",
       .allowed = {"stop", "skip"}},
      {.name = "validate_every",
       .field = field_of<&TrainSection::validate_every>,
       .help = "Steps between measurements of the validation loss, which is also measured before and after the run; 0: "
               "never",
       .unit = "steps",
       .range = kFromZero,
       .aliases = {"validation.freq", "step_scheduler.val_every_steps", "sft.val_period"}},
      {.name = "early_stopping.patience",
       .field = field_of<&TrainSection::early_stopping_patience>,
       .help = "End the run after so many validations in a row without a lower loss; the run still saves and exports; "
               "0: never",
       .unit = "validations",
       .range = {.minimum = 0, .maximum = 1e9}},
      {.name = "early_stopping.min_delta",
       .field = field_of<&TrainSection::early_stopping_min_delta>,
       .help = "A validation loss counts as lower if it is lower than the best one by more than this",
       .range = {.minimum = 0}},
      {.name = "sample_every",
       .field = field_of<&TrainSection::sample_every>,
       .help = "Steps between printed samples: a greedy generation from the start of the first validation row, or of "
               "the first training row where there is no validation; 0: never",
       .unit = "steps",
       .range = kFromZero},
      {.name = "profile",
       .field = field_of<&TrainSection::profile>,
       .help = "Each rank writes a trace of three steps, after three warm-up steps, into profile/ in checkpoint.dir; "
               "tessera report shows a summary",
       .aliases = {"profiling.enable_profiling"}},
      {.name = "page",
       .field = field_of<&TrainSection::page>,
       .help = "Port on rank 0's host, loopback only, that serves the page of tessera report while the run goes on, to "
               "all users who are logged in on this host; 0: no page",
       .range = {.minimum = 0, .maximum = 65535}},

  };
}

std::vector<RecipeKey> make_precision_keys() {
  return {
      {.name = "param",
       .field = field_of<&PrecisionSection::param>,
       .help = "Compute dtype; parameters are all-gathered in it",
       .allowed = kDtypes,
       .aliases = {"training.mixed_precision_param"}},
      {.name = "reduce",
       .field = field_of<&PrecisionSection::reduce>,
       .help = "Dtype in which gradients are reduced",
       .allowed = kDtypes,
       .aliases = {"training.mixed_precision_reduce"}},
      {.name = "output",
       .field = field_of<&PrecisionSection::output>,
       .help = "Dtype of the logits",
       .allowed = kDtypes},
      {.name = "fp8",
       .field = field_of<&PrecisionSection::fp8>,
       .help = "Compute the linears of the layers, but not the head, in float8 with one scale per tensor (torchao's "
               "tensorwise recipe). A device without float8 products, such as the CPU, computes the same values in "
               "float32. Not with tp or model.lora",
       .aliases = {"float8.enable_float8_linear"}},
  };
}

std::vector<RecipeKey> make_checkpoint_keys() {
  return {
      {.name = "dir",
       .field = field_of<&CheckpointSection::dir>,
       .help = "Folder of the run; RECIPE-NAME stands for the name of the recipe file",
       .required = true,
       .aliases = {"checkpoint.folder", "checkpoint.checkpoint_dir", "checkpointing.checkpoint_dir"}},
      {.name = "every",
       .field = field_of<&CheckpointSection::every>,
       .help = "Steps between checkpoints; one more is saved at the end; 0: a checkpoint only when the run is asked to "
               "stop",
       .unit = "steps",
       .range = kFromZero,
       .aliases = {"checkpoint.interval", "step_scheduler.ckpt_every_steps", "checkpointing.save_period"}},
      {.name = "keep_last",
       .field = field_of<&CheckpointSection::keep_last>,
       .help = "How many of the most recently published checkpoints are kept",
       .unit = "checkpoints",
       .range = {.minimum = 1, .maximum = 1e6},
       .aliases = {"checkpoint.keep_latest_k", "checkpoint.max_recent_checkpoints"}},
      {.name = "keep_best",
       .field = field_of<&CheckpointSection::keep_best>,
       .help =
           "How many checkpoints with the lowest validation loss are kept; above 0 the run validates before each save",
       .unit = "checkpoints",
       .range = {.minimum = 0, .maximum = 1e6},
       .aliases = {"checkpointing.keep_top_k"}},
      {.name = "async",
       .field = field_of<&CheckpointSection::async>,
       .help = "Continue training while a checkpoint is written",
       .aliases = {"checkpoint.is_async"}},
      {.name = "resume",
       .field = field_of<&CheckpointSection::resume>,
       .help = "auto: from the checkpoint published last in dir, if there is one; never: start anew, and move what is "
               "in dir to dir/previous; or the folder of a checkpoint, or of a run (its newest checkpoint)",
       .required = true},
      {.name = "export",
       .field = field_of<&CheckpointSection::export_model>,
       .help = "When the model is written to model/ in checkpoint.dir, as a Hugging Face folder",
       .allowed = {"final", "every", "never"},
       .aliases = {"checkpoint.save_consolidated"}},

  };
}

std::vector<RecipeKey> make_log_keys() {
  return {
      {.name = "every",
       .field = field_of<&LogSection::every>,
       .help = "Steps between lines on stderr; 0: no lines",
       .unit = "steps",
       .range = kFromZero,
       .aliases = {"metrics.log_freq"}},
      {.name = "tensorboard",
       .field = field_of<&LogSection::tensorboard>,
       .help = "Write TensorBoard event files to tensorboard/ in checkpoint.dir",
       .aliases = {"metrics.enable_tensorboard", "logger.tensorboard_enabled"}},
      {.name = "jsonl",
       .field = field_of<&LogSection::jsonl>,
       .help = "Write one JSON object per step to metrics.jsonl in checkpoint.dir"},

  };
}

std::vector<RecipeKey> make_comm_keys() {
  return {
      {.name = "backend",
       .field = field_of<&CommSection::backend>,
       .help = "Back-end of the collectives; auto chooses by host and device",
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
       .help = "When ranks compare which collective each of them called: never (off), at a timeout, or before each "
               "collective (always)",
       .allowed = {"off", "timeout", "always"}},
      {.name = "high_priority_streams",
       .field = field_of<&CommSection::high_priority_streams>,
       .help = "On accelerators, run collectives on streams of high priority, so that they start before compute "
               "kernels that are ready at the same time"},
      {.name = "split_groups",
       .field = field_of<&CommSection::split_groups>,
       .help = "NCCL: split the groups of a mesh's dims from the world's communicator, and further groups of the same "
               "ranks from the first one"},
  };
}

}  // namespace tessera::train
