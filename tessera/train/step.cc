#include "tessera/train/step.h"

#include <ATen/core/grad_mode.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <string>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/shm/shared_buffer.h"
#include "tessera/models/causal_lm.h"
#include "tessera/optim/grad_norm.h"
#include "tessera/optim/optimizer.h"
#include "tessera/parallel/fully_shard.h"
#include "tessera/parallel/gradient_sync.h"

namespace tessera::train {
namespace {

// One row of numbers from each rank to all, in rank order: sums over it are the same on every rank and in every run.
std::vector<std::vector<double>> gather_numbers(comm::Group& group, const std::vector<double>& own) {
  const auto count = static_cast<int64_t>(own.size());
  auto all = at::empty({group.size(), count}, at::kDouble);
  comm::all_gather_into(group, all, at::tensor(own, at::kDouble), "step numbers").wait();
  std::vector<std::vector<double>> rows;
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto* row = all.const_data_ptr<double>() + rank * count;
    rows.emplace_back(row, row + count);
  }
  return rows;
}

int64_t status_bytes(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(field + ":")) return std::stoll(line.substr(field.size() + 1)) * 1024;
  }
  return 0;
}

at::Tensor loss_sum(CausalLM& model, const data::Batch& batch) {
  return model.loss_sum({.tokens = batch.tokens, .positions = batch.positions, .document_ids = batch.document_ids},
                        batch.labels);
}

}  // namespace

int64_t resident_bytes() { return status_bytes("VmRSS") - static_cast<int64_t>(comm::shm::viewed_bytes()); }
int64_t peak_resident_bytes() { return status_bytes("VmHWM") - static_cast<int64_t>(comm::shm::viewed_bytes()); }

TrainStep::TrainStep(CausalLM& model, optim::Optimizer& optimizer, std::shared_ptr<comm::Group> group,
                     StepOptions options)
    : model_(model), optimizer_(optimizer), group_(std::move(group)), options_(options) {
  set_gradient_divide_factor(model_, 1);  // the loss is divided by the label tokens of all ranks already
}

StepResult TrainStep::run(const std::vector<data::Batch>& micro_batches, double lr, const StepSignals& signals) {
  StepResult result;
  std::vector<double> counts = {0, 0, signals.stop ? 1.0 : 0.0, signals.failed ? 1.0 : 0.0};
  for (const auto& batch : micro_batches) {
    if (!options_.counts) break;
    counts[0] += static_cast<double>(batch.label_tokens);
    counts[1] += static_cast<double>(batch.tokens_used);
  }
  for (const auto& row : gather_numbers(*group_, counts)) {
    result.label_tokens += static_cast<int64_t>(row[0]);
    result.tokens += static_cast<int64_t>(row[1]);
    result.stop_requested = result.stop_requested || row[2] > 0;
    result.failed = result.failed || row[3] > 0;
  }
  if (result.failed) return result;
  const double divisor = static_cast<double>(std::max<int64_t>(result.label_tokens, 1));
  const bool reduce_each = is_fully_sharded(model_) && !options_.defer_gradient_sync;
  double own_loss = 0;
  for (size_t i = 0; i < micro_batches.size(); ++i) {
    set_requires_gradient_sync(model_, reduce_each || i + 1 == micro_batches.size());
    auto loss = loss_sum(model_, micro_batches[i]) / divisor;
    loss.backward();
    if (options_.counts) own_loss += loss.item<double>();
  }
  for (const auto& row : gather_numbers(*group_, {own_loss, static_cast<double>(resident_bytes())})) {
    result.loss += row[0];
    result.memory_bytes = std::max(result.memory_bytes, static_cast<int64_t>(row[1]));
  }
  const auto parameters = model_.parameters();
  result.grad_norm = optim::get_grad_norm(parameters);
  if (!std::isfinite(result.loss) || !std::isfinite(result.grad_norm)) {
    optimizer_.zero_grad();
    TESSERA_CHECK(options_.skip_nonfinite, ErrorKind::kInternal,
                  "[train.step] loss {} and gradient norm {} of {} label tokens: not finite. Lower optimizer.lr, or "
                  "set train.on_nonfinite=skip to leave such steps out.",
                  result.loss, result.grad_norm, result.label_tokens);
    result.skipped = true;
    return result;
  }
  if (options_.max_grad_norm > 0) optim::clip_grad_by_total_norm_(parameters, options_.max_grad_norm, result.grad_norm);
  optimizer_.set_lr(lr);
  optimizer_.step();
  optimizer_.zero_grad();
  return result;
}

double validation_loss(CausalLM& model, const std::shared_ptr<comm::Group>& group,
                       const std::vector<data::Batch>& batches, bool counts) {
  const at::NoGradGuard no_grad;
  const bool was_training = model.training();
  model.train(false);
  double sum = 0;
  double labels = 0;
  for (const auto& batch : batches) {
    const double loss = loss_sum(model, batch).item<double>();
    sum += counts ? loss : 0;
    labels += counts ? static_cast<double>(batch.label_tokens) : 0;
  }
  model.train(was_training);
  double total_sum = 0;
  double total_labels = 0;
  for (const auto& row : gather_numbers(*group, {sum, labels})) {
    total_sum += row[0];
    total_labels += row[1];
  }
  return total_sum / std::max(total_labels, 1.0);
}

}  // namespace tessera::train
