#include "tessera/train/run/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/comm/launch/reported_steps.h"
#include "tessera/models/config/end_tokens.h"
#include "tessera/models/generation/generate.h"
#include "tessera/train/run/run_export.h"
#include "tessera/train/run/run_rows.h"
#include "tessera/train/run/stop_signals.h"
#include "tessera/train/run/trainer_impl.h"

namespace tessera::train {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

}  // namespace

// Launches step `step`, and then reports the step before it. On an accelerator the host reads the batch of a step while
// the device still computes the previous step, and reads the result of the previous step while the device computes this
// one. Each rank passes StepSignals::failed to launch() when its asynchronous save has failed. launch() returns
// `failed` on all ranks if any rank has set it, so all ranks throw in the same step.
void Trainer::Impl::train_step(int64_t step) {
  if (profile) profile->begin(step);
  const auto start = Clock::now();
  const int64_t rows = recipe.train.global_batch_size / run_mesh.data_size();
  const auto batch = [&] {
    const TraceSpan span(recorder(), "data");
    return run_mesh.local_tokens(
        loader->next_global_slice(recipe.train.global_batch_size, run_mesh.data_rank() * rows, rows));
  }();
  const double data_seconds = seconds_since(start);
  const double lr = schedule->at(step - 1);
  const auto all_signals = step_runner->launch(micro_batches(batch, recipe.train.local_batch_size), lr,
                                               {.stop = StopSignals::requested(), .failed = checkpoints->failed()});
  if (all_signals.failed) {  // the step was not launched; report the steps before it, then throw
    report_finished_steps(0);
    checkpoints->finish();  // throws, on every rank
  }
  stop_requested = all_signals.stop;
  const double snapshot = std::exchange(snapshot_seconds, 0);
  const double checkpoint = std::exchange(checkpoint_seconds, 0) + snapshot;
  if (profile) {
    profile->add_seconds("data", data_seconds);
    profile->add_seconds("snapshot", snapshot);
    profile->add_seconds("checkpoint", checkpoint);
  }
  report_finished_steps(1);  // reports the step before this one
  unreported_metrics.push_back({.step = step,
                                .lr = lr,
                                .seconds = seconds_since(start),
                                .data_seconds = data_seconds,
                                .snapshot_seconds = snapshot,
                                .checkpoint_seconds = checkpoint});
  if (!step_runner->runs_ahead()) report_finished_steps(0);
  if (profile) {
    const auto summary = profile->end(step);
    if (summary && report) report->profile(step, *summary);
  }
}

// Waits for the results of all launched steps except the last `steps_left_running`, and reports them in order.
void Trainer::Impl::report_finished_steps(int steps_left_running) {
  while (step_runner->pending_steps() > steps_left_running) {
    const auto result = step_runner->read_step_result();
    if (report) report->step(unreported_metrics.front(), result);
    unreported_metrics.pop_front();
  }
}

void Trainer::Impl::validate(int64_t step) {
  report_finished_steps(0);
  const TraceSpan span(recorder(), "validation");
  const auto start = Clock::now();
  last_validation_loss =
      validation_loss(*model, step_runner->pipeline(), world->group(), validation_batches, run_mesh.is_counted());
  validated_step = step;
  early_stopping.add_validation(step, *last_validation_loss);
  if (report) report->validation(step, *last_validation_loss, seconds_since(start));
  TESSERA_CHECK(std::isfinite(*last_validation_loss) || recipe.train.on_nonfinite == "skip", ErrorKind::kInternal,
                "[train.validation] step {}: validation loss {} of the rows of data.validation: not finite. Lower "
                "optimizer.lr, or set train.on_nonfinite=skip to go on.",
                step, *last_validation_loss);
}

// Reports a greedy continuation of the start of the first validation row, or of the first training row if there is no
// validation.
void Trainer::Impl::sample(int64_t step) {
  report_finished_steps(0);
  constexpr int64_t kNewTokens = 48;
  const int64_t first_row[] = {0};
  const auto prompt = sample_prompt((data.validation ? *data.validation : *data.train).rows(first_row));
  auto options = GenerationOptions::from_folder(recipe.model.path, config);
  options.stop_tokens = end_tokens(recipe.model.path, config, *data.tokenizer, data.chat_template);
  options.max_new_tokens = kNewTokens;
  const bool was_training = model->training();
  model->train(false);
  auto tokens = step_runner->pipeline().generate(prompt, options, &run_mesh.world_group());
  model->train(was_training);
  // If the generated tokens end with a stop token, this token is removed, because it is not part of the sample's text.
  const auto& stops = options.stop_tokens;
  const bool has_end = !tokens.empty() && std::ranges::find(stops, tokens.back()) != stops.end();
  if (has_end) tokens.pop_back();
  const auto text_of = [&](const std::vector<int64_t>& ids) {
    return data.tokenizer->decode(std::vector<text::TokenId>(ids.begin(), ids.end()));
  };
  if (report) report->sample(step, text_of(prompt), text_of(tokens));
}

// StepOptions::before_update: waits for the copies of a running save. With defer_copy, save() returns before the
// tensors are copied, and an update of the parameters must not change the tensors before the copies are complete.
void Trainer::Impl::wait_for_snapshot() {
  const TraceSpan span(recorder(), "waiting for a save");
  const auto start = Clock::now();
  checkpoints->wait_for_snapshot();
  snapshot_seconds += seconds_since(start);
}

// Warns once if a data file changed since it was read. This run is not affected, because its rows are already made.
void Trainer::Impl::warn_changed_data() {
  if (!is_rank_zero() || warned_changed_data) return;
  auto path = data.train->changed_file();
  if (!path && data.validation) path = data.validation->changed_file();
  if (!path) return;
  warned_changed_data = true;
  log_warning(
      "[data] {}: was written to, moved or removed after this run read it. The run continues with the data that it has "
      "read; to resume it later, the data must be the same again.",
      path->string());
}

// Saves a checkpoint. For checkpoint.keep_best the checkpoint is ranked by the validation loss, if this loss was
// measured after the same step. All launched steps are reported first: if the loss or norm of one is not finite,
// report_finished_steps() throws before anything is written.
void Trainer::Impl::save(int64_t step) {
  report_finished_steps(0);
  const TraceSpan span(recorder(), "checkpoint");
  warn_changed_data();
  const auto start = Clock::now();
  // With a pipeline each stage saves its own tensors; a weight that two stages hold is saved by the first of them.
  auto state = training_state(*model, *optimizer);
  if (const auto stages = run_mesh.pipeline()) state = tensors_saved_by_stage(state, *stages->group(0));
  checkpoints->save(step, state.tensors, extra_state(), validated_step == step ? last_validation_loss : std::nullopt,
                    state.objects);
  checkpoint_seconds += seconds_since(start);
}

// The loop. Every decision in it (validate, sample, save, stop) depends only on values that are equal on all ranks: the
// step, the recipe, the flags of launch() and the validation loss. So all ranks make the same collective calls.
RunSummary Trainer::Impl::run() {
  const StopSignals signals;
  if (recipe.train.profile) {
    profile = std::make_unique<StepProfile>(
        *model, world->group(),
        StepProfileOptions{.folder = run_path() / "profile", .steps = profiled_steps(first_step, steps)});
  }
  if (is_rank_zero()) report = std::make_unique<RunReport>(recipe, *folder, config, session());
  const bool validates = recipe.train.validate_every > 0 && !validation_batches.empty();
  if (validates && first_step == 0) validate(0);
  int64_t step = first_step;
  const auto due = [&](int64_t every) { return every > 0 && step % every == 0; };
  int64_t saved_step = first_step;
  while (step < steps && !stop_requested && !early_stopping.is_over()) {
    train_step(++step);
    if (is_rank_zero()) comm::report_step(step);
    bool last = step == steps;
    const bool saves = due(recipe.checkpoint.every) || ((last || stop_requested) && recipe.checkpoint.every > 0);
    // With keep_best the model is validated before each save, because the validation loss decides which checkpoints are
    // kept. A run that was asked to stop skips this validation, to end soon.
    const bool ranks = saves && !stop_requested && recipe.checkpoint.keep_best > 0;
    if (validates && (due(recipe.train.validate_every) || last || ranks)) validate(step);
    if (due(recipe.train.sample_every)) sample(step);
    last = last || early_stopping.is_over();
    if (saves || (last && recipe.checkpoint.every > 0)) {
      save(step);
      saved_step = step;
      if (recipe.checkpoint.export_model == "every" && !last) {
        checkpoints->wait_for_snapshot();  // merging adapters may change weights that the save still copies
        export_run(recipe, run_mesh, data, *model, folder.get());
      }
    }
  }
  report_finished_steps(0);
  checkpoints->finish();
  const bool enough = step < steps && early_stopping.is_over();
  const bool stopped_early = step < steps && !enough;
  if (enough && is_rank_zero()) log_info("[train.early_stopping] after step {}: {}", step, early_stopping.reason());
  // A run that was asked to stop saves even with checkpoint.every 0, so that no work is lost.
  if (stopped_early && saved_step < step) save(step), checkpoints->finish();
  if (profile) {
    const auto summary = profile->finish();
    if (summary && report) report->profile(step, *summary);
  }
  if (!stopped_early && recipe.checkpoint.export_model != "never") {
    export_run(recipe, run_mesh, data, *model, folder.get());
  }
  if (report) {
    if (enough) report->early_stop(step, early_stopping.reason());
    report->finish(step, stopped_early
                             ? fmt::format("asked to stop after step {}; the same command goes on from there", step)
                         : recipe.checkpoint.export_model == "never"
                             ? fmt::format("done, {}", run_path().string())
                             : fmt::format("done, the {} in {}",
                                           recipe.lora.is_enabled() && !recipe.lora.merge ? "adapters are" : "model is",
                                           (run_path() / "model").string()));
  }
  return {first_step, step, stopped_early};
}

Trainer::Trainer(const Recipe& recipe, std::shared_ptr<comm::World> world)
    : impl_(std::make_unique<Impl>(recipe, std::move(world))) {}
Trainer::~Trainer() = default;
RunSummary Trainer::run() { return impl_->run(); }

}  // namespace tessera::train
