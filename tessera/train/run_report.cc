#include "tessera/train/run_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "tessera/models/config.h"
#include "tessera/train/machine_peak.h"
#include "tessera/train/outliers.h"
#include "tessera/train/progress.h"
#include "tessera/train/recipe_print.h"
#include "tessera/train/run_folder.h"
#include "tessera/train/step.h"
#include "tessera/train/tensorboard.h"

namespace tessera::train {

struct RunReport::Impl {
  RunFolder& folder;
  Progress progress;
  std::optional<EventWriter> events;
  bool jsonl = true;
  double step_flops_per_token = 0;
  double peak_flops = 0;  // of all ranks, per second
  OutlierDetector losses = OutlierDetector();
  OutlierDetector norms = OutlierDetector();
  double total_seconds = 0;
  int64_t total_tokens = 0;
};

namespace {

ProgressOptions progress_options(const Recipe& recipe, int64_t first_step, int64_t steps) {
  ProgressOptions options = progress_for_stderr();
  options.total_steps = steps;
  options.first_step = first_step;
  options.every = recipe.log.every;
  return options;
}

}  // namespace

RunReport::RunReport(const Recipe& recipe, RunFolder& folder, const ModelConfig& config, int world_size,
                     int64_t first_step, int64_t steps)
    : impl_(
          new Impl{.folder = folder, .progress = Progress(progress_options(recipe, first_step, steps)), .events = {}}) {
  impl_->jsonl = recipe.log.jsonl;
  impl_->step_flops_per_token = flops_per_token(config, recipe.data.sequence_length);
  impl_->peak_flops = matmul_peak(recipe.precision.param == "bfloat16" ? c10::kBFloat16 : c10::kFloat) * world_size;
  folder.write_recipe(recipe);
  if (impl_->jsonl) folder.open_metrics(first_step);
  if (recipe.log.tensorboard) {
    auto& events = impl_->events.emplace(folder.path() / "tensorboard");
    events.start_session(first_step);
    // Markdown: an indented block keeps the YAML's lines.
    std::string text = "    " + to_yaml(recipe);
    for (size_t at = 0; (at = text.find('\n', at)) != text.npos; at += 5) text.insert(at + 1, "    ");
    events.add_text("recipe", text, first_step);
    events.flush();
  }
}

RunReport::~RunReport() = default;

void RunReport::step(int64_t step, const StepResult& result, double lr, double seconds) {
  const double time = std::max(seconds, 1e-9);
  const double tokens = static_cast<double>(result.tokens);
  const double share = impl_->step_flops_per_token * tokens / time / impl_->peak_flops;
  const double loss_z = impl_->losses.add(result.loss);
  const double norm_z = impl_->norms.add(result.grad_norm);
  impl_->total_seconds += seconds;
  impl_->total_tokens += result.tokens;
  if (impl_->jsonl) {
    impl_->folder.append({.step = step,
                          .loss = result.loss,
                          .grad_norm = result.grad_norm,
                          .lr = lr,
                          .tokens = result.tokens,
                          .tokens_per_second = tokens / time,
                          .memory_bytes = result.memory_bytes,
                          .peak_share = share,
                          .seconds = seconds});
  }
  if (impl_->events) {
    auto& events = *impl_->events;
    events.add_scalar("train/loss", result.loss, step);
    events.add_scalar("train/grad_norm", result.grad_norm, step);
    events.add_scalar("train/lr", lr, step);
    events.add_scalar("train/tokens_per_second", tokens / time, step);
    events.add_scalar("train/memory_bytes", static_cast<double>(result.memory_bytes), step);
    events.add_scalar("train/peak_share", share, step);
    if (!std::isnan(loss_z)) events.add_scalar("train/loss_z", loss_z, step);
    if (!std::isnan(norm_z)) events.add_scalar("train/grad_norm_z", norm_z, step);
    events.flush();
  }
  impl_->progress.step({.step = step,
                        .loss = result.loss,
                        .loss_z = loss_z,
                        .grad_norm = result.grad_norm,
                        .grad_norm_z = norm_z,
                        .lr = lr,
                        .tokens_per_second = tokens / time,
                        .memory_bytes = result.memory_bytes,
                        .peak_share = share,
                        .seconds = seconds,
                        .skipped = result.skipped});
}

void RunReport::validation(int64_t step, double loss, double seconds) {
  if (impl_->jsonl) impl_->folder.append_validation(step, loss, seconds);
  if (impl_->events) {
    impl_->events->add_scalar("validation/loss", loss, step);
    impl_->events->flush();
  }
  impl_->progress.validation(step, loss);
}

void RunReport::finish(bool stopped_early) {
  const double speed = static_cast<double>(impl_->total_tokens) / std::max(impl_->total_seconds, 1e-9);
  impl_->progress.finish(fmt::format("{}: {} tokens in {} ({:.0f} tok/s). Everything is in {}",
                                     stopped_early ? "stopped early, state saved" : "done", impl_->total_tokens,
                                     format_duration(impl_->total_seconds), speed, impl_->folder.path().string()));
}

}  // namespace tessera::train
