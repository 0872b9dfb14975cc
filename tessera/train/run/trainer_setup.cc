// What a Trainer does before its first step: it checks the run, builds its parts and resumes a checkpoint.
#include <fmt/ranges.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/checkpoint/folder.h"
#include "tessera/comm/collectives/agreement.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/random/random.h"
#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/formats/tensor_files/finite.h"
#include "tessera/kernels/linear/linear.h"
#include "tessera/models/files/weights.h"
#include "tessera/train/recipe/recipe_print.h"
#include "tessera/train/recipe/recipe_schedule.h"
#include "tessera/train/run/check_run.h"
#include "tessera/train/run/model_source.h"
#include "tessera/train/run/recipe_notes.h"
#include "tessera/train/run/resume_notes.h"
#include "tessera/train/run/run_rows.h"
#include "tessera/train/run/trainer_impl.h"

namespace tessera::train {
namespace {

// Whether `path` is a direct child of `folder`.
bool is_in(const std::filesystem::path& path, const std::filesystem::path& folder) {
  return std::filesystem::weakly_canonical(path).parent_path() == std::filesystem::weakly_canonical(folder);
}

}  // namespace

Trainer::Impl::Impl(const Recipe& run_recipe, std::shared_ptr<comm::World> run_world)
    : recipe(run_recipe),
      world(std::move(run_world)),
      run_mesh(build_run_mesh(recipe, world)),
      early_stopping({recipe.train.early_stopping_patience, recipe.train.early_stopping_min_delta}) {
  // The order: checks and data first, which fail early and cheaply; then the model, optimizer and data loader; then
  // resume(), which loads into them; then dropout, which depends on the first step.
  prepare();
  manual_seed(static_cast<uint64_t>(recipe.train.seed), run_mesh.mesh());
  // Checks a checkpoint that is only the source of the initial weights: Checkpoint::open() compares its files with the
  // hashes in its manifest. A checkpoint that the run resumes from is checked when resume() opens it.
  const auto weights = weights_path(recipe);
  if (recipe.model.init == "pretrained" && DcpFolder::is_dcp_folder(weights)) {
    Checkpoint::open(weights, run_mesh.world_group());
  }
  model = build_model(recipe, config, run_mesh.mesh());
  optimizer = build_optimizer(recipe, *model);
  if (is_rank_zero() && recipe.model.dtype != "float32") log_info("{}", describe_precision(recipe));
  loader =
      std::make_unique<data::DataLoader>(data.train, static_cast<uint64_t>(recipe.train.seed), true,
                                         total_rows(recipe, *data.train).value_or(std::numeric_limits<int64_t>::max()));
  step_runner = std::make_unique<TrainStep>(*model, *optimizer, world->group(run_mesh.mesh()->device_type()),
                                            StepOptions{.max_grad_norm = recipe.optimizer.max_grad_norm,
                                                        .skip_nonfinite = recipe.train.on_nonfinite == "skip",
                                                        .early_step = recipe.optimizer.early_step_in_backward,
                                                        .defer_gradient_sync = recipe.parallel.defer_gradient_sync,
                                                        .is_counted = run_mesh.is_counted(),
                                                        .before_update = [this] { wait_for_snapshot(); },
                                                        .keep_float8_weights = !run_mesh.shards_weights(),
                                                        .pipeline = pipeline_options(recipe, config, run_mesh.mesh())});
  checkpoints = std::make_unique<CheckpointWriter>(CheckpointOptions{.folder = run_path() / "checkpoints",
                                                                     .world = world,
                                                                     .keep_last = recipe.checkpoint.keep_last,
                                                                     .keep_best = recipe.checkpoint.keep_best,
                                                                     .async = recipe.checkpoint.async,
                                                                     .defer_copy = true,
                                                                     .stage_ranks = run_mesh.stage_ranks()});
  if (data.validation) validation_batches = batches_of_rank(*data.validation, recipe.train.local_batch_size, run_mesh);
  resume();
  set_dropout_positions();
  if (!is_rank_zero()) return;
  if (const auto adapters = describe_run_adapters(recipe, config); !adapters.empty()) {
    log_info("[train.adapters] {}", adapters);
  }
  for (const auto& note : recipe_notes(recipe, data.train->rows(), steps)) log_warning("{}", note);
}

// Dropout masks of adapters are drawn by the global index of a row in the training order (and, with cp, by the global
// position of a token). The masks therefore do not depend on the layout, nor on where a run was resumed. row_of_call
// maps the n-th forward of this rank to the index of its first row.
void Trainer::Impl::set_dropout_positions() {
  const auto dropout = adapter_dropout(*model);
  if (!dropout) return;
  dropout->seed = static_cast<uint64_t>(recipe.train.seed);
  const auto& mesh = *run_mesh.mesh();
  if (const int64_t dim = mesh.dim_of("cp"); mesh.size(dim) > 1) {
    dropout->context.emplace(recipe.data.sequence_length, mesh.size(dim));
    dropout->context_rank = mesh.local_rank(dim);
  }
  // `calls` is the number of micro-batches of this rank in a step. Forward n of this rank, counted over all steps from
  // 0, is micro-batch n % calls of step n / calls. The index of its first row in the global order is the sum of: the
  // rows of earlier steps, this rank's offset in the global batch, and this rank's rows in earlier micro-batches of the
  // step.
  const int64_t batch = recipe.train.global_batch_size, rows = batch / run_mesh.data_size();
  const int64_t at_once = recipe.train.local_batch_size, calls = rows / at_once, offset = run_mesh.data_rank() * rows;
  dropout->calls = first_step * calls;
  dropout->row_of_call = [=](int64_t call) { return call / calls * batch + offset + call % calls * at_once; };
}

// Everything before the model is built: checks of recipe and layout, data, and the lock of the run's folder. Each part
// runs inside attempt_together, so that an error on one rank is thrown on all ranks and no rank is left waiting. Then
// the ranks compare what they read from their own files: ranks with different data or models would train garbage.
void Trainer::Impl::prepare() {
  comm::attempt_together(run_mesh.world_group(), [&] {
    if (is_rank_zero()) check_run_folder(recipe);
    config = load_model_config(recipe);
    layout = resolve_layout(recipe, world->size());
    check_layout(recipe, layout, config);
    const int64_t stage_ranks = layout.ranks_of_stage(), stage = world->rank() / stage_ranks;
    // check_parallel_model() lays out the model as one rank of this rank's stage would. It prints warnings only when
    // that rank is the first rank of the stage. Here it simulates the last rank, so it prints no warnings;
    // build_model() prints them later, when it lays out the real model.
    check_parallel_model(recipe, layout, config, (stage + 1) * stage_ranks - 1);
    check_parameter_groups(recipe, config);
    adapters_identity = adapter_identity(recipe);
  });
  data = load_run_data_on_all_ranks(recipe, *world, run_mesh.world_group());
  comm::attempt_together(run_mesh.world_group(), [&] {
    plan_steps(total_steps(recipe, *data.train));
    model_identity = model_fingerprint(recipe);
  });
  auto facts = run_facts(recipe, data, model_identity);
  facts.emplace_back("the adapters", adapters_identity);
  comm::check_same(run_mesh.world_group(), facts,
                   "Start all of them with the same recipe, data, model and version of this program.");
  comm::attempt_together(run_mesh.world_group(), [&] {
    if (!is_rank_zero()) return;
    folder = std::make_unique<RunFolder>(run_path());
    if (recipe.checkpoint.export_model != "never") folder->check_model_replaceable();
  });
}

// State of a checkpoint apart from tensors: positions and random numbers that a resumed run continues from, and facts
// that resume() compares with the new run.
nlohmann::json Trainer::Impl::extra_state() const {
  const auto random = random_state(run_mesh.mesh());
  return {{"data", loader->state()},
          {"base", base_model_reference(recipe)},
          {"recipe", to_yaml(recipe)},
          {"optimizer", recipe.optimizer.name},
          {"model", model_identity},
          {"lora", adapters_identity},
          {"kernels", kernels::describe_cpu_kernels()},
          {"validation", data.validation ? data.validation->fingerprint() : ""},
          {"early_stopping", early_stopping.state()},
          {"random", {{"seed", random.seed}, {"offset", random.offset}}}};
}

SessionFacts Trainer::Impl::session() const {
  return {.ranks = world->size(),
          .layout = describe_layout(layout),
          .device = c10::DeviceTypeName(run_mesh.mesh()->device_type(), /*lower_case=*/true),
          .first_step = first_step,
          .total_steps = steps,
          .parameters = count_parameters(*make_model(config, {.device = c10::Device(at::kMeta)})),
          .warnings = warnings};
}

// Loads a checkpoint if checkpoint.resume selects one: the newest of this run's folder (auto) or a named one. All ranks
// load the checkpoint that rank 0 found, although a shared file system may show them different folders. Checks come
// before the first tensor is loaded. If the run's folder holds checkpoints, metrics and other files of an earlier run
// that this run does not continue, these files are moved to previous/NNN and not deleted.
void Trainer::Impl::resume() {
  auto& group = run_mesh.world_group();
  const auto& resume_setting = recipe.checkpoint.resume;
  std::optional<Checkpoint> checkpoint;
  if (resume_setting == "auto") checkpoint = Checkpoint::latest(run_path() / "checkpoints", group);
  const bool named = resume_setting != "auto" && resume_setting != "never";
  if (named) {
    std::string path;  // rank 0 reads LATEST, if `resume_setting` is the folder of a run; the path is broadcast
    comm::attempt_together(group, [&] {
      TESSERA_CHECK(std::filesystem::is_directory(resume_setting), ErrorKind::kConfig,
                    "[train.resume] checkpoint.resume: found {}, wanted auto, never, or the folder of a checkpoint or "
                    "of a run.",
                    resume_setting);
      if (group.rank() == 0) path = CheckpointFolder::resolve_latest(resume_setting).string();
    });
    checkpoint = Checkpoint::open(comm::broadcast_bytes(group, path), group);
  }
  comm::attempt_together(group, [&] {
    if (!checkpoint) return;
    const auto& extra = checkpoint->extra();
    TESSERA_CHECK(extra.contains("data"), ErrorKind::kConfig,
                  "[train.resume] {}: no run of this program wrote it, so that it has no position in the data. Start "
                  "from its weights with model.weights={}.",
                  checkpoint->path().string(), checkpoint->path().string());
    const auto check = [&](const char* key, const std::string& now) {
      if (!extra.contains(key)) return;  // written by an earlier version
      TESSERA_CHECK(extra.at(key) == now, ErrorKind::kConfig,
                    "[train.resume] {}: written with another {}: {}, now {}. Use the recipe that wrote it, another "
                    "checkpoint.dir, or checkpoint.resume=never, which puts it aside and starts anew.",
                    checkpoint->path().string(), key, extra.at(key).dump(), now);
    };
    check("optimizer", recipe.optimizer.name);
    check("model", model_identity);
    check("lora", adapters_identity);
    const auto kernels = extra.value("kernels", kernels::describe_cpu_kernels());
    if (is_rank_zero() && kernels != kernels::describe_cpu_kernels()) {
      log_warning(
          "[train.resume] {}: computed with {}, here with {}: later numbers agree up to rounding, not bit by bit",
          checkpoint->path().string(), kernels, kernels::describe_cpu_kernels());
    }
    // The state of early stopping is loaded only if the validation data is the same, because losses of other data
    // cannot be compared with its best loss.
    const bool same_validation = data.validation && extra.value("validation", "") == data.validation->fingerprint();
    if (const auto found = extra.find("early_stopping"); found != extra.end() && same_validation) {
      early_stopping.load_state(*found);
    }
    loader->load_state(extra.at("data"));
    if (const auto random = extra.find("random"); random != extra.end()) {
      set_random_state({random->at("seed").get<uint64_t>(), random->at("offset").get<uint64_t>()}, run_mesh.mesh());
    }
    const auto state = training_state(*model, *optimizer).tensors;
    checkpoint->load(state);
    for (const auto& [name, tensor] : state) {
      check_finite(local_tensor_of(tensor), name, "[train.resume] " + checkpoint->path().string());
    }
  });
  // The run continues the metrics in its folder only if the checkpoint is in this folder; otherwise all files of the
  // earlier run are moved to previous/NNN. If checkpoint.resume names an earlier checkpoint of this folder, the later
  // checkpoints are moved there; RunReport then drops the lines of later steps.
  const bool goes_on = checkpoint && is_in(checkpoint->path(), run_path() / "checkpoints");
  comm::attempt_together(group, [&] {
    if (!is_rank_zero()) return;
    if (goes_on && !named) return;
    const auto aside = goes_on
                           ? folder->archive_later_checkpoints(std::filesystem::weakly_canonical(checkpoint->path()))
                           : folder->archive_history();
    if (!aside.empty()) {
      log_info("[train.resume] files of an earlier run in {} were moved to {}", run_path().string(), aside.string());
    }
  });
  if (!checkpoint) return;
  first_step = checkpoint->step();
  optimizer->set_step(first_step);
  // With train.epochs, a resumed run computes its number of steps again, from the rows that are left, because the steps
  // before the checkpoint may have had another global_batch_size.
  if (recipe.train.epochs) {
    comm::attempt_together(group, [&] { plan_steps(first_step + steps_for_rows(recipe, loader->samples_left())); });
  }
  if (!is_rank_zero()) return;
  log_info("[train.resume] {} after step {}", checkpoint->path().string(), first_step);
  for (const auto& note : resume_notes(checkpoint->extra().value("recipe", ""), recipe, first_step, steps)) {
    log_info("{}", note);
  }
}

void Trainer::Impl::plan_steps(int64_t count) {
  steps = count;
  schedule = build_schedule(recipe, steps);
}

}  // namespace tessera::train
