#include "tessera/parallel/pipeline/detail/execution.h"

#include <exception>

#include "tessera/base/error.h"

namespace tessera::pipeline::detail {
namespace {

// Removes and returns the tensor for (stage, micro-batch). Error kInternal if it is missing; `tensor_name` names it.
template <class Map>
auto extract(Map& waiting, std::pair<int, int> key, const char* tensor_name) {
  const auto found = waiting.find(key);
  TESSERA_CHECK(found != waiting.end(), ErrorKind::kInternal, "[pipeline.run] stage {}, micro-batch {}: {} is missing",
                key.first, key.second, tensor_name);
  auto value = std::move(found->second);
  waiting.erase(found);
  return value;
}

}  // namespace

RankProgram::RankProgram(const ActionRow& row, bool splits_backward) {
  for (const auto& cell : row) {
    if (!cell) continue;
    for (auto& step : cell->steps()) {
      if (!splits_backward && step.kind == ActionKind::kWeightBackward) continue;
      if (!splits_backward && step.kind == ActionKind::kInputBackward) step.kind = ActionKind::kBackward;
      actions.push_back(std::move(step));
    }
  }
  // In the loop, `forward` is the last computation before actions[i] if that computation is a forward, else null.
  const Action* forward = nullptr;
  for (size_t i = 0; i < actions.size(); ++i) {
    const auto& action = actions[i];
    if (!action.computes()) continue;
    const std::pair key{action.stage, action.micro_batch};
    const bool backward = action.kind == ActionKind::kBackward || action.kind == ActionKind::kInputBackward;
    if (action.kind == ActionKind::kInputBackward) splits.insert(key);
    if (backward && forward != nullptr && std::pair{forward->stage, forward->micro_batch} == key) {
      backward_next.insert(key);
    }
    forward = action.kind == ActionKind::kForward ? &action : nullptr;
    if (action.kind != ActionKind::kBackward && action.kind != ActionKind::kWeightBackward) continue;
    last_of_stage[action.stage] = last = i;
  }
}

Execution::Execution(CausalLM& model, const StagePlan& plan, StageChannel* channel,
                     const std::vector<ModelInputs>& micro_batches, double loss_divisor)
    : plan_(plan),
      channel_(channel),
      micro_batches_(micro_batches),
      loss_divisor_(loss_divisor),
      runner_(model, micro_batches) {}

// Completes::all is true for the backward that completes all gradients, and also for the forward of the same stage and
// micro-batch, because replicate() reads in forward whether to synchronise.
DataParallelHooks::Completes Execution::completes(const RankProgram& program, size_t position) const {
  const auto &action = program.actions[position], &last = program.actions[program.last];
  const bool forward_of_last =
      action.kind == ActionKind::kForward && action.stage == last.stage && action.micro_batch == last.micro_batch;
  const auto of_stage = program.last_of_stage.find(action.stage);
  return {.all = position == program.last || forward_of_last,
          .stage = of_stage != program.last_of_stage.end() && of_stage->second == position};
}

void Execution::run(const RankProgram& program, DataParallelHooks* hooks) {
  // If an exception leaves run(), `guard` aborts the process group and destroys the handles of pending sends. The
  // destructor of `guard` does this, because it runs during stack unwinding: the destructor of a PendingCollective then
  // gives up its message. In a catch block, the destructor of a PendingCollective would wait for a peer that may never
  // answer.
  struct AbortOnError {
    StageChannel* channel;
    int unwinding = std::uncaught_exceptions();
    ~AbortOnError() {
      if (channel != nullptr && std::uncaught_exceptions() > unwinding) channel->abort_group();
    }
  };
  const AbortOnError guard{channel_};
  for (size_t i = 0; i < program.actions.size(); ++i) {
    const auto& action = program.actions[i];
    const bool calls_hooks = hooks != nullptr && action.computes();
    if (calls_hooks) hooks->before(action, completes(program, i));
    perform(action, program, hooks);
    if (calls_hooks) hooks->after(action, completes(program, i));
    if (channel_ != nullptr) channel_->release_sent();
  }
  if (channel_ != nullptr) channel_->finish();
}

bool Execution::is_here(int stage) const { return channel_ == nullptr || rank_of(stage) == channel_->rank(); }

void Execution::perform(const Action& action, const RankProgram& program, DataParallelHooks* hooks) {
  switch (action.kind) {
    case ActionKind::kForward:
      return forward(action, program);
    case ActionKind::kBackward:
    case ActionKind::kInputBackward:
      return backward(action);
    case ActionKind::kWeightBackward:
      return runner_.weight_backward(action.stage, action.micro_batch);
    case ActionKind::kUnshard:
      if (hooks != nullptr) hooks->unshard(action.stage);
      return;
    case ActionKind::kReshard:
      if (hooks != nullptr) hooks->reshard(action.stage);
      return;
    case ActionKind::kReduceGrad:
      return;  // the hooks let the last backward of the stage reduce its gradients
    default:
      return exchange(action);
  }
}

void Execution::forward(const Action& action, const RankProgram& program) {
  const StageMicroBatch key{action.stage, action.micro_batch};
  auto batch = inputs(action.micro_batch);
  const auto range = plan_.range(action.stage);
  if (plan_.stages() > 1) batch.stage = range;
  // A stage that is not the first reads its input, the output of the stage before. If that stage is on this rank, its
  // forward has stored the output in hidden_; otherwise the receive of the output is in hidden_in_.
  at::Tensor hidden;
  if (!range.is_first) {
    hidden = is_here(action.stage - 1) ? extract(hidden_, key, "its input")
                                       : extract(hidden_in_, key, "its input").wait_for_tensor();
  }
  const ForwardOptions options{
      .loss_divisor = loss_divisor_,
      .splits_backward = program.splits.contains(key),
      .accumulates_head_gradient = range.is_last && plan_.stages() > 1 && !program.backward_next.contains(key)};
  const auto stage_output = runner_.forward(action.stage, action.micro_batch, std::move(batch), hidden, options);
  if (range.is_last) {
    if (stage_output.defined()) results_[action.micro_batch] = stage_output;
    return;
  }
  // The output is stored under the key of the next stage. If that stage is on another rank, SEND_F takes the output
  // from there and sends it.
  hidden_[{action.stage + 1, action.micro_batch}] = stage_output;
}

void Execution::backward(const Action& action) {
  const StageMicroBatch key{action.stage, action.micro_batch};
  const auto range = plan_.range(action.stage);
  at::Tensor gradient;
  if (!range.is_last) {
    gradient = is_here(action.stage + 1) ? extract(gradients_, key, "the gradient of its output")
                                         : extract(gradients_in_, key, "the gradient of its output").wait_for_tensor();
  }
  // Action I leaves the gradients of weights to action W; action B computes all gradients.
  const bool keep_weights = action.kind == ActionKind::kInputBackward;
  auto input_gradient = runner_.backward(action.stage, action.micro_batch, gradient, keep_weights);
  if (range.is_first) return;
  gradients_[{action.stage - 1, action.micro_batch}] = std::move(input_gradient);
}

void Execution::exchange(const Action& action) {
  const StageMicroBatch key{action.stage, action.micro_batch};
  // forward() stores the output of a stage under the key of the next stage, and backward() stores the gradient of the
  // stage's input under the key of the stage before. SEND_F and SEND_B take the tensors from there.
  const StageMicroBatch next{action.stage + 1, action.micro_batch}, previous{action.stage - 1, action.micro_batch};
  const auto tokens = inputs(action.micro_batch).tokens.sizes();
  switch (action.kind) {
    case ActionKind::kSendForward:
      return channel_->send_forward({rank_of(action.stage + 1), action.stage + 1, action.micro_batch},
                                    extract(hidden_, next, "its input"), tokens);
    case ActionKind::kReceiveForward:
      hidden_in_.emplace(
          key, channel_->receive_forward({rank_of(action.stage - 1), action.stage, action.micro_batch}, tokens));
      return;
    case ActionKind::kSendBackward:
      return channel_->send_backward({rank_of(action.stage - 1), action.stage - 1, action.micro_batch},
                                     extract(gradients_, previous, "the gradient of its output"), tokens);
    default:
      gradients_in_.emplace(
          key, channel_->receive_backward({rank_of(action.stage + 1), action.stage, action.micro_batch}, tokens));
  }
}

}  // namespace tessera::pipeline::detail
