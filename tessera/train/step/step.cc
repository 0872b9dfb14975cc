#include "tessera/train/step/step.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros_like.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>

#include "tessera/base/error.h"
#include "tessera/base/ignored_label.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/collectives/communication_time.h"
#include "tessera/comm/shm/shared_buffer.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/kernels/loss/head_chunks.h"
#include "tessera/mesh/host_memory.h"
#include "tessera/models/adapters/adapters.h"
#include "tessera/models/decoder/causal_lm.h"
#include "tessera/optim/found_inf.h"
#include "tessera/optim/grad_norm.h"
#include "tessera/optim/optimizer.h"
#include "tessera/parallel/data_parallel/gradient_sync.h"
#include "tessera/parallel/experts/expert_parallel.h"
#include "tessera/parallel/fsdp/fully_shard.h"

namespace tessera::train {
namespace {

// All-gathers one row of numbers per rank, in rank order. The caller adds the rows up itself, in this order, so that
// sums have the same bits on every rank and in every run; an all-reduce does not promise this.
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

// A field of /proc/self/status, which is in KiB, in bytes; 0 if the file has no such field.
int64_t status_bytes(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(field + ":")) return std::stoll(line.substr(field.size() + 1)) * 1024;
  }
  return 0;
}

// The device that the model computes on. With CPU offload it differs from the device of the parameters.
c10::Device device_of(CausalLM& model) {
  for (const auto& parameter : model.parameters()) {
    return is_dtensor(parameter) ? device_mesh(parameter)->device() : parameter.device();
  }
  return c10::Device(c10::kCPU);
}

// Whether all parameters, and so the optimizer's updates, are on an accelerator.
bool updates_on_device(CausalLM& model) {
  const auto parameters = model.parameters();
  return !parameters.empty() && std::ranges::all_of(parameters, [](const at::Tensor& parameter) {
    return !local_tensor_of(parameter).device().is_cpu();
  });
}

// Whether the optimizer on the device can skip a step whose loss or norm is not finite, without the host reading these
// numbers first.
bool skips_step_on_device(CausalLM& model, const optim::Optimizer& optimizer, const comm::Group& group) {
  return optimizer.takes_found_inf() && group.supports_device(device_of(model).type());
}

}  // namespace

int64_t resident_bytes() { return status_bytes("VmRSS") - static_cast<int64_t>(comm::shm::viewed_bytes()); }
int64_t peak_resident_bytes() { return status_bytes("VmHWM") - static_cast<int64_t>(comm::shm::viewed_bytes()); }

TrainStep::TrainStep(CausalLM& model, optim::Optimizer& optimizer, std::shared_ptr<comm::Group> group,
                     StepOptions options)
    : model_(model),
      optimizer_(optimizer),
      group_(std::move(group)),
      options_(std::move(options)),
      pipeline_(model, options_.pipeline),
      inputs_(device_of(model), model.config()),
      runs_ahead_(updates_on_device(model) &&
                  (!options_.skip_nonfinite || skips_step_on_device(model, optimizer, *group_))) {
  options_.is_counted = options_.is_counted && pipeline_.has_last_stage();
  set_gradient_divide_factor(model_, 1);  // the loss is divided by the label tokens of all ranks already
  if (options_.early_step) {
    TESSERA_CHECK(
        options_.max_grad_norm == 0 && !options_.skip_nonfinite && pipeline_.plan().stages() == 1, ErrorKind::kConfig,
        "[train.step] early_step with max_grad_norm {}, skip_nonfinite {} and {} stages: parameters are updated "
        "before all gradients are computed. Set max_grad_norm to 0, skip_nonfinite to false, and use one stage.",
        options_.max_grad_norm, options_.skip_nonfinite, pipeline_.plan().stages());
    early_ = std::make_unique<EarlyUpdates>(model_, optimizer_);
  }
  if (options_.keep_float8_weights) float8_ = nn::float8_steps(model_);
  const auto& experts = model.config().experts;
  if (!experts.adds_balance_loss || experts.num_experts == 0 || experts.balance_coefficient == 0) return;
  // A pipeline stage without routers gets a RouterStatistics that stays zero, because all ranks must call
  // reduce_router_statistics() in each step.
  routers_ = nn::router_statistics(model_);
  if (!routers_) routers_ = std::make_shared<nn::RouterStatistics>(experts.num_experts, experts.balance_coefficient);
}

// Returns the load-balance loss over all tokens of the step; undefined if it is not enabled. The loss is not a sum over
// tokens: its gradient needs the routing counts of the whole step. An additional forward therefore counts the routes of
// all micro-batches before the first backward. COLLECTIVE over `group_`.
at::Tensor TrainStep::compute_balance_loss(const std::vector<ModelInputs>& micro_batches) {
  if (!routers_) return {};
  // The additional forward is the call of pipeline_.evaluate(). It advances the counters of the LoraDropout, so the
  // LoraDropout is reset afterwards to its value from before the call. The forwards of the step itself then draw the
  // same dropout masks as the additional forward.
  const auto dropout = adapter_dropout(model_);
  const auto before = dropout ? *dropout : nn::LoraDropout{};
  routers_->begin();
  pipeline_.evaluate(micro_batches);
  if (dropout) *dropout = before;
  return reduce_router_statistics(*routers_, *group_, device_of(model_));
}

// One all-gather before the step. Each rank sends its token counts (the loss is divided by the sum of label tokens),
// its StepSignals, and a wrong label of its batches, if there is one. Every rank then sees the numbers of all ranks and
// takes the same decision: go on, return without a step, or throw. COLLECTIVE over `group_`.
void TrainStep::exchange_counts(const std::vector<data::Batch>& micro_batches, const StepSignals& signals,
                                StepResult& result) {
  const int64_t classes = model_.config().vocab_size;
  std::vector<double> own = {0, 0, signals.stop ? 1.0 : 0.0, signals.failed ? 1.0 : 0.0, kIgnoredLabel};
  for (const auto& batch : micro_batches) {
    // The labels are checked here, while they are still on the host. If they were checked on the device, the host would
    // have to wait for the device.
    if (const int64_t wrong = kernels::first_wrong_label(batch.labels, classes); wrong >= 0) {
      own[4] = static_cast<double>(batch.labels.flatten()[wrong].item<int64_t>());
    }
    if (!options_.is_counted) continue;
    own[0] += static_cast<double>(batch.label_tokens);
    own[1] += static_cast<double>(batch.tokens_used);
  }
  const auto rows = gather_numbers(*group_, own);
  for (size_t rank = 0; rank < rows.size(); ++rank) {
    const auto& row = rows[rank];
    result.label_tokens += static_cast<int64_t>(row[0]);
    result.tokens += static_cast<int64_t>(row[1]);
    result.all_signals.stop = result.all_signals.stop || row[2] > 0;
    result.all_signals.failed = result.all_signals.failed || row[3] > 0;
    TESSERA_CHECK(
        row[4] == kIgnoredLabel, ErrorKind::kFormat,
        "[train.step] rank {}: found label {}, wanted one of the {} classes of the model, or {}. Tokenize the "
        "data with the model's own tokenizer.",
        rank, row[4], classes, kIgnoredLabel);
  }
}

// Copies loss, norm and balance loss to the host: on the device they are stacked first, so that there is one copy. When
// launch() runs ahead the copy is asynchronous, into pinned memory; read_step_result() waits for the event
// `step.written`.
void TrainStep::copy_numbers_to_host(std::vector<at::Tensor> numbers, LaunchedStep& step) const {
  const bool together =
      std::ranges::all_of(numbers, [&](const at::Tensor& number) { return number.device() == numbers[0].device(); });
  const auto device = runs_ahead_ || together ? numbers[0].device() : c10::Device(c10::kCPU);
  for (auto& number : numbers) number = number.to(device);
  const auto all = at::stack(numbers);
  if (!runs_ahead_) {
    step.numbers = all.cpu();
    return;
  }
  step.numbers = pinned_empty(all.numel(), at::kDouble, device);
  step.numbers.copy_(all, /*non_blocking=*/true);
  step.written = DeviceEvent::record_on_current(device);
}

// Gathers the numbers of all ranks into the result of the step, and decides about a step that is not finite. Loss and
// norm are the same on all ranks afterwards, so all ranks skip or all ranks throw. If launch() ran ahead, the device
// skipped the update already (found_inf), and only the step count is corrected here. COLLECTIVE over the group.
void TrainStep::gather_result(LaunchedStep& step) {
  auto& result = step.result;
  const auto* numbers = step.numbers.const_data_ptr<double>();
  // This result reports the seconds of this call so far and of all calls since the previous result. The clock restarts
  // here, so the all-gather below counts for the next result.
  const double now = comm::communication_seconds();
  const double communicated =
      now - std::exchange(collective_seconds_at_call_start_, now) + std::exchange(unreported_collective_seconds_, 0);
  std::optional<size_t> wrong_rank;
  for (const auto& row : gather_numbers(*group_, {numbers[0], static_cast<double>(resident_bytes()), communicated})) {
    result.loss += row[0];
    if (!wrong_rank && !std::isfinite(row[0])) wrong_rank = result.communication_seconds.size();
    result.memory_bytes = std::max(result.memory_bytes, static_cast<int64_t>(row[1]));
    result.communication_seconds.push_back(row[2]);
  }
  result.grad_norm = numbers[1];
  if (routers_) result.balance_loss = numbers[2];
  if (std::isfinite(result.loss) && std::isfinite(result.grad_norm)) return;
  if (!runs_ahead_) optimizer_.zero_grad();
  // The number of this step. If runs_ahead_ is true, optimizer_.steps() already counts this step and the
  // pending_steps() steps that were launched after it. Otherwise optimizer_.steps() does not count this step yet.
  const int64_t number = runs_ahead_ ? optimizer_.steps() - pending_steps() : optimizer_.steps() + 1;
  TESSERA_CHECK(
      options_.skip_nonfinite, ErrorKind::kInternal,
      "[train.step] step {}: loss {} and gradient norm {} of {} label tokens{}: not finite. Lower optimizer.lr, or "
      "set train.on_nonfinite=skip to leave such steps out.",
      number, result.loss, result.grad_norm, result.label_tokens,
      wrong_rank && group_->size() > 1 ? fmt::format(", first in the rows of rank {}", *wrong_rank) : "");
  result.skipped = true;
  if (runs_ahead_) optimizer_.set_step(optimizer_.steps() - 1);  // launch() counted the skipped step
}

// The collectives of a step must have the same order on all ranks: counts, routes, forward and backward, norm, result,
// update. If runs_ahead() is true, launch() does not gather the result; the trainer calls read_step_result() one step
// later, which gathers the result. After the exchange of the counts, launch() then only launches work on the device,
// and the host reads no tensor of the device.
StepSignals TrainStep::launch(const std::vector<data::Batch>& micro_batches, double lr, const StepSignals& signals) {
  LaunchedStep step;
  collective_seconds_at_call_start_ = comm::communication_seconds();
  exchange_counts(micro_batches, signals, step.result);
  const auto all_signals = step.result.all_signals;
  if (all_signals.failed) return all_signals;
  // A global batch without label tokens has loss 0 and zero gradients, and not 0 / 0.
  const double divisor = static_cast<double>(std::max<int64_t>(step.result.label_tokens, 1));
  const bool reduce_each = is_fully_sharded(model_) && !options_.defer_gradient_sync;
  const auto inputs = inputs_.stage(micro_batches);
  if (float8_) float8_->begin_float8_step();
  const auto balance = compute_balance_loss(inputs);
  pipeline::PipelineStepOptions step_options{.loss_divisor = divisor, .reduce_each = reduce_each};
  if (early_) {
    early_->begin(lr, options_.before_update);
    step_options.before_last_backward = [this] { early_->enable_updates(); };
  }
  const auto loss = pipeline_.step(inputs, step_options);
  if (routers_) routers_->end();
  const auto norm =
      early_ ? early_->finish_step() : pipeline_.norm_over_stages(optim::grad_norm_tensor(pipeline_.norm_parameters()));
  std::vector<at::Tensor> numbers = {options_.is_counted ? loss : at::zeros_like(norm), norm};
  // A flag on the device, 1 on all ranks if the loss or norm of any rank is not finite. The optimizer kernel reads the
  // flag and then leaves parameters and state unchanged, so the host need not wait for the flag.
  at::Tensor found_inf;
  if (runs_ahead_ && options_.skip_nonfinite) found_inf = optim::found_inf(*group_, numbers, device_of(model_));
  if (balance.defined()) numbers.push_back(balance);
  copy_numbers_to_host(std::move(numbers), step);
  if (!runs_ahead_) gather_result(step);
  if (!step.result.skipped) {
    // If runs_ahead() is true, the host has not read the norm yet, so clipping uses the norm tensor on the device.
    // Otherwise clipping uses the norm that gather_result() put into the result.
    const auto parameters = model_.parameters();
    if (options_.max_grad_norm > 0 && runs_ahead_) {
      optim::clip_grad_by_total_norm_(parameters, options_.max_grad_norm, norm);
    } else if (options_.max_grad_norm > 0) {
      optim::clip_grad_by_total_norm_(parameters, options_.max_grad_norm, step.result.grad_norm);
    }
    if (options_.before_update && !early_) options_.before_update();
    optimizer_.set_lr(lr);
    optimizer_.step(found_inf);
    optimizer_.zero_grad();
  }
  launched_.push_back(std::move(step));
  unreported_collective_seconds_ += comm::communication_seconds() - collective_seconds_at_call_start_;
  return all_signals;
}

StepResult TrainStep::read_step_result() {
  TESSERA_CHECK(!launched_.empty(), ErrorKind::kInternal,
                "[train.step] read_step_result() without a step that was launched");
  auto step = std::move(launched_.front());
  launched_.pop_front();
  if (!runs_ahead_) return std::move(step.result);
  collective_seconds_at_call_start_ = comm::communication_seconds();
  step.written.wait();
  gather_result(step);
  unreported_collective_seconds_ += comm::communication_seconds() - collective_seconds_at_call_start_;
  return std::move(step.result);
}

StepResult TrainStep::run(const std::vector<data::Batch>& micro_batches, double lr, const StepSignals& signals) {
  TESSERA_CHECK(launched_.empty(), ErrorKind::kInternal, "[train.step] run() with {} steps whose result was not read",
                launched_.size());
  const auto all_signals = launch(micro_batches, lr, signals);
  return all_signals.failed ? StepResult{.all_signals = all_signals} : read_step_result();
}

double validation_loss(CausalLM& model, const std::shared_ptr<comm::Group>& group,
                       const std::vector<data::Batch>& batches, bool is_counted) {
  pipeline::Pipeline whole(model);
  return validation_loss(model, whole, group, batches, is_counted);
}

double validation_loss(CausalLM& model, pipeline::Pipeline& pipeline, const std::shared_ptr<comm::Group>& group,
                       const std::vector<data::Batch>& batches, bool is_counted) {
  const bool was_training = model.training();
  model.train(false);
  // Four micro-batches per stage at a time keep all stages busy. More micro-batches would only take more memory: the
  // outputs of a stage are kept until the next stage has used them.
  const StagedInputs inputs(device_of(model), model.config());
  const size_t at_once = 4 * static_cast<size_t>(pipeline.plan().stages());
  double loss = 0;
  for (size_t first = 0; first < batches.size(); first += at_once) {
    const auto begin = batches.begin() + static_cast<std::ptrdiff_t>(first);
    const auto count = static_cast<std::ptrdiff_t>(std::min(at_once, batches.size() - first));
    loss += pipeline.evaluate(inputs.stage({begin, begin + count})).item<double>();
  }
  model.train(was_training);
  double sum = 0, labels = 0;
  if (is_counted && pipeline.has_last_stage()) {
    sum = loss;
    for (const auto& batch : batches) labels += static_cast<double>(batch.label_tokens);
  }
  double total_sum = 0;
  double total_labels = 0;
  for (const auto& row : gather_numbers(*group, {sum, labels})) {
    total_sum += row[0];
    total_labels += row[1];
  }
  return total_sum / std::max(total_labels, 1.0);
}

}  // namespace tessera::train
