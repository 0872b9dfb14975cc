#include "tessera/train/output/run_report.h"

#include <ATen/Parallel.h>
#include <fmt/chrono.h>
#include <torch/version.h>

#include <ctime>
#include <nlohmann/json.hpp>

#include "tessera/base/machine/host.h"
#include "tessera/base/text/json_numbers.h"
#include "tessera/base/version.h"
#include "tessera/comm/launch/reported_steps.h"
#include "tessera/train/profile/machine_peak.h"
#include "tessera/train/recipe/recipe_print.h"

namespace tessera::train {
namespace {

ProgressOptions progress_options(const Recipe& recipe, int64_t first_step, int64_t total_steps) {
  auto options = progress_for_stderr();
  options.total_steps = total_steps;
  options.first_step = first_step;
  options.every = recipe.log.every;
  return options;
}

nlohmann::ordered_json as_json(const SessionFacts& session, const ModelConfig& config) {
  return {{"started", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)))},
          {"version", version()},
          {"torch", TORCH_VERSION},
          {"host", host_name()},
          {"ranks", session.ranks},
          {"layout", session.layout},
          {"device", session.device},
          {"threads", at::get_num_threads()},
          {"model", config.architecture},
          {"parameters", session.parameters},
          {"total_steps", session.total_steps}};
}

}  // namespace

RunReport::RunReport(const Recipe& recipe, RunFolder& folder, const ModelConfig& config, const SessionFacts& session)
    : jsonl_(recipe.log.jsonl),
      folder_(folder),
      progress_(progress_options(recipe, session.first_step, session.total_steps)),
      warnings_(session.warnings),
      flops_per_token_(flops_per_token(config, recipe.data.sequence_length)),
      peak_flops_(
          matmul_peak(recipe.precision.param == "bfloat16" ? c10::ScalarType::BFloat16 : c10::ScalarType::Float) *
          session.ranks) {
  // The history is cut back to first_step before the first line of this session is appended. Warnings that were logged
  // before this moment, by checks and loading, are written as events of first_step.
  const int64_t first_step = session.first_step;
  folder_.write_recipe(recipe);
  if (jsonl_) {
    folder_.open_history(first_step);
    folder_.append_event(first_step, "session", as_json(session, config));
    if (const auto restart = comm::restart_reason()) {
      folder_.append_event(first_step, "restart", {{"attempt", restart->attempt}, {"reason", restart->text}});
    }
    write_warnings(first_step);
  }
  if (recipe.log.tensorboard) {
    events_.emplace(folder_.path() / "tensorboard");
    events_->start_session(first_step);
    if (first_step == 0) events_->add_text("recipe", "```yaml\n" + to_yaml(recipe) + "```", 0);
    events_->flush();
  }
}

void RunReport::write_warnings(int64_t step) {
  if (!jsonl_ || !warnings_) return;
  for (const auto& text : warnings_->take_warnings()) folder_.append_event(step, "warning", text);
}

// The z-scores of loss and gradient norm are computed from the steps of this session only. They are shown on stderr and
// not stored.
void RunReport::step(StepMetrics metrics, const StepResult& result) {
  const int64_t step = metrics.step;
  metrics.loss = result.loss;
  metrics.loss_z = losses_.add(result.loss);
  metrics.grad_norm = result.grad_norm;
  metrics.grad_norm_z = norms_.add(result.grad_norm);
  metrics.balance_loss = result.balance_loss;
  metrics.tokens = result.tokens;
  metrics.tokens_per_second = static_cast<double>(result.tokens) / metrics.seconds;
  metrics.memory_bytes = result.memory_bytes;
  metrics.peak_share = flops_per_token_ * metrics.tokens_per_second / peak_flops_;
  metrics.skipped = result.skipped;
  metrics.communication_seconds = result.communication_seconds;
  if (jsonl_) folder_.append(metrics);
  write_warnings(step);
  if (events_) {
    events_->add_scalar("train/loss", metrics.loss, step);
    events_->add_scalar("train/grad_norm", metrics.grad_norm, step);
    if (metrics.balance_loss) events_->add_scalar("train/balance_loss", *metrics.balance_loss, step);
    events_->add_scalar("train/lr", metrics.lr, step);
    events_->add_scalar("train/tokens_per_second", metrics.tokens_per_second, step);
    events_->add_scalar("train/memory_bytes", static_cast<double>(metrics.memory_bytes), step);
    events_->add_scalar("train/peak_share", metrics.peak_share, step);
    events_->flush();
  }
  progress_.step(metrics);
}

void RunReport::validation(int64_t step, double loss, double seconds) {
  if (jsonl_) folder_.append_validation(step, loss, seconds);
  if (events_) {
    events_->add_scalar("validation/loss", loss, step);
    events_->flush();
  }
  progress_.validation(step, loss);
}

void RunReport::sample(int64_t step, const std::string& prompt, const std::string& text) {
  if (jsonl_) folder_.append_event(step, "sample", {{"prompt", prompt}, {"text", text}});
  if (events_) {
    events_->add_text("sample", "> " + prompt + "\n\n" + text, step);
    events_->flush();
  }
  progress_.sample(step, dump_json(prompt), dump_json(text));
}

void RunReport::profile(int64_t step, const nlohmann::ordered_json& summary) {
  if (jsonl_) folder_.append_event(step, "profile", summary);
}

void RunReport::early_stop(int64_t step, const std::string& reason) {
  if (jsonl_) folder_.append_early_stop(step, reason);
}

void RunReport::finish(int64_t step, const std::string& last_line) {
  write_warnings(step);
  if (jsonl_) folder_.append_event(step, "end", last_line);
  progress_.finish(last_line);
}

}  // namespace tessera::train
