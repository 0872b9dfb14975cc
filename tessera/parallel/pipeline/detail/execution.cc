#include "tessera/parallel/pipeline/detail/execution.h"

#include <exception>

#include "tessera/base/error.h"

namespace tessera::pipeline::detail {
namespace {

// Removes and returns the tensor for (stage, micro-batch). Error kInternal if it is missing; `what` names it.
template <class Map>
auto taken(Map& waiting, std::pair<int, int> place, const char* what) {
  const auto found = waiting.find(place);
  TESSERA_CHECK(found != waiting.end(), ErrorKind::kInternal, "[pipeline.run] stage {}, micro-batch {}: {} is missing",
                place.first, place.second, what);
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
  // One pass over the actions. `forward` is the last computation if it was a forward.
  const Action* forward = nullptr;
  for (size_t i = 0; i < actions.size(); ++i) {
    const auto& action = actions[i];
    if (!action.computes()) continue;
    const std::pair place{action.stage, action.micro_batch};
    const bool backward = action.kind == ActionKind::kBackward || action.kind == ActionKind::kInputBackward;
    if (action.kind == ActionKind::kInputBackward) splits.insert(place);
    if (backward && forward != nullptr && std::pair{forward->stage, forward->micro_batch} == place) {
      backward_next.insert(place);
    }
    forward = action.kind == ActionKind::kForward ? &action : nullptr;
    if (action.kind != ActionKind::kBackward && action.kind != ActionKind::kWeightBackward) continue;
    last_of_stage[action.stage] = last = i;
  }
}

Execution::Execution(CausalLM& model, const StagePlan& plan, Wire* wire, const std::vector<ModelInputs>& micro_batches,
                     double loss_divisor)
    : plan_(plan),
      wire_(wire),
      micro_batches_(micro_batches),
      loss_divisor_(loss_divisor),
      runs_(model, micro_batches) {}

// The forward that belongs to the completing backward counts, too, because data parallelism reads its switches in
// forward.
DataParallelHooks::Completes Execution::completes(const RankProgram& program, size_t position) const {
  const auto &action = program.actions[position], &last = program.actions[program.last];
  const bool forward_of_last =
      action.kind == ActionKind::kForward && action.stage == last.stage && action.micro_batch == last.micro_batch;
  const auto of_stage = program.last_of_stage.find(action.stage);
  return {.all = position == program.last || forward_of_last,
          .stage = of_stage != program.last_of_stage.end() && of_stage->second == position};
}

void Execution::run(const RankProgram& program, DataParallelHooks* hooks) {
  // Aborts the group from a destructor, while the error unwinds the stack: messages that are dropped during unwinding
  // are abandoned. In a catch block their destructors would wait for peers that may never answer.
  struct BreakOffOnError {
    Wire* wire;
    int unwinding = std::uncaught_exceptions();
    ~BreakOffOnError() {
      if (wire != nullptr && std::uncaught_exceptions() > unwinding) wire->break_off();
    }
  };
  const BreakOffOnError guard{wire_};
  for (size_t i = 0; i < program.actions.size(); ++i) {
    const auto& action = program.actions[i];
    const bool told = hooks != nullptr && action.computes();
    if (told) hooks->before(action, completes(program, i));
    perform(action, program, hooks);
    if (told) hooks->after(action, completes(program, i));
    if (wire_ != nullptr) wire_->release_sent();
  }
  if (wire_ != nullptr) wire_->finish();
}

bool Execution::is_here(int stage) const { return wire_ == nullptr || rank_of(stage) == wire_->rank(); }

void Execution::perform(const Action& action, const RankProgram& program, DataParallelHooks* hooks) {
  switch (action.kind) {
    case ActionKind::kForward:
      return forward(action, program);
    case ActionKind::kBackward:
    case ActionKind::kInputBackward:
      return backward(action);
    case ActionKind::kWeightBackward:
      return runs_.weight_backward(action.stage, action.micro_batch);
    case ActionKind::kUnshard:
      if (hooks != nullptr) hooks->unshard(action.stage);
      return;
    case ActionKind::kReshard:
      if (hooks != nullptr) hooks->reshard(action.stage);
      return;
    case ActionKind::kReduceGrad:
      return;  // the backward before it reduced, as the hooks switched it
    default:
      return exchange(action);
  }
}

void Execution::forward(const Action& action, const RankProgram& program) {
  const Place place{action.stage, action.micro_batch};
  auto batch = inputs(action.micro_batch);
  const auto range = plan_.range(action.stage);
  if (plan_.stages() > 1) batch.stage = range;
  // The input was stored by a stage of this rank, or is being received from another rank.
  at::Tensor hidden;
  if (!range.is_first) {
    hidden =
        is_here(action.stage - 1) ? taken(hidden_, place, "its input") : taken(hidden_in_, place, "its input").take();
  }
  const ForwardHow how{.loss_divisor = loss_divisor_,
                       .splits_backward = program.splits.contains(place),
                       .hands_on_head = range.is_last && plan_.stages() > 1 && !program.backward_next.contains(place)};
  const auto given = runs_.forward(action.stage, action.micro_batch, std::move(batch), hidden, how);
  if (range.is_last) {
    if (given.defined()) results_[action.micro_batch] = given;
    return;
  }
  // Stored under the next stage, whether it is on this rank or its tensor is sent by the next SEND_F.
  hidden_[{action.stage + 1, action.micro_batch}] = given;
}

void Execution::backward(const Action& action) {
  const Place place{action.stage, action.micro_batch};
  const auto range = plan_.range(action.stage);
  at::Tensor gradient;
  if (!range.is_last) {
    gradient = is_here(action.stage + 1) ? taken(gradients_, place, "the gradient of its output")
                                         : taken(gradients_in_, place, "the gradient of its output").take();
  }
  // Action I leaves the gradients of weights to action W; action B computes all gradients.
  const bool keep_weights = action.kind == ActionKind::kInputBackward;
  auto of_input = runs_.backward(action.stage, action.micro_batch, gradient, keep_weights);
  if (range.is_first) return;
  gradients_[{action.stage - 1, action.micro_batch}] = std::move(of_input);
}

void Execution::exchange(const Action& action) {
  const Place place{action.stage, action.micro_batch};
  // A stage's output is stored under the next stage and its input's gradient under the stage before, so a SEND finds
  // them there.
  const Place next{action.stage + 1, action.micro_batch}, previous{action.stage - 1, action.micro_batch};
  const auto tokens = inputs(action.micro_batch).tokens.sizes();
  switch (action.kind) {
    case ActionKind::kSendForward:
      return wire_->send_forward({rank_of(action.stage + 1), action.stage + 1, action.micro_batch},
                                 taken(hidden_, next, "its input"), tokens);
    case ActionKind::kReceiveForward:
      hidden_in_.emplace(place,
                         wire_->receive_forward({rank_of(action.stage - 1), action.stage, action.micro_batch}, tokens));
      return;
    case ActionKind::kSendBackward:
      return wire_->send_backward({rank_of(action.stage - 1), action.stage - 1, action.micro_batch},
                                  taken(gradients_, previous, "the gradient of its output"), tokens);
    default:
      gradients_in_.emplace(
          place, wire_->receive_backward({rank_of(action.stage + 1), action.stage, action.micro_batch}, tokens));
  }
}

}  // namespace tessera::pipeline::detail
