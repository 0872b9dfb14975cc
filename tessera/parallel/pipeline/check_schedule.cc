#include "tessera/parallel/pipeline/check_schedule.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>

#include "tessera/base/error.h"
#include "tessera/parallel/pipeline/detail/rounds.h"

namespace tessera::pipeline {
namespace {

// The computations that have run, and the time at which each result was ready.
using DoneAt = std::map<Action::Key, double>;

std::optional<double> ready_at(const DoneAt& done, int stage, ActionKind kind, int micro_batch) {
  const auto found = done.find({stage, kind, micro_batch});
  if (found == done.end()) return std::nullopt;
  return found->second;
}

// The time at which the gradient of the stage's input was ready, from B or I; nullopt: not yet.
std::optional<double> gradient_at(const DoneAt& done, int stage, int micro_batch) {
  const auto whole = ready_at(done, stage, ActionKind::kBackward, micro_batch);
  return whole ? whole : ready_at(done, stage, ActionKind::kInputBackward, micro_batch);
}

// The time at which all inputs of an action were ready; nullopt: not yet.
std::optional<double> inputs_at(const DoneAt& done, const Action& action, int stages) {
  switch (action.kind) {
    case ActionKind::kForward:
      return action.stage == 0 ? 0 : ready_at(done, action.stage - 1, ActionKind::kForward, action.micro_batch);
    case ActionKind::kBackward:
    case ActionKind::kInputBackward: {
      const auto own = ready_at(done, action.stage, ActionKind::kForward, action.micro_batch);
      if (!own || action.stage == stages - 1) return own;
      return gradient_at(done, action.stage + 1, action.micro_batch);
    }
    default:
      return ready_at(done, action.stage, ActionKind::kInputBackward, action.micro_batch);
  }
}

// The result of run_table(), which simulates the actions of a ScheduleTable: each action runs as soon as its rank is
// free and its inputs are ready; messages between ranks take no time.
struct TimedRun {
  std::vector<std::vector<TableStep>> rows;
  std::vector<size_t> ran;    // number of steps that ran in each row; fewer than the row has: it waits for ever
  double time = 0, busy = 0;  // until the last rank is done; sum of all ranks' busy time
};

// Rows are run in rounds until no row can continue. A row that then has steps left waits for ever: the order within a
// row is fixed, and a result, once ready, stays ready. So the set of steps that run does not depend on the order of the
// rounds.
TimedRun run_table(const ScheduleTable& table, int stages, const ActionCosts& costs) {
  const std::array<double, 4> cost_of = {costs.forward, costs.backward, costs.input_backward, costs.weight_backward};
  TimedRun out;
  for (const auto& row : table.ranks) out.rows.push_back(steps_of(row));
  std::vector<double> clock(out.rows.size(), 0);
  DoneAt done;
  out.ran = detail::run_in_rounds(out.rows, [&](size_t rank, const TableStep& step) {
    const auto ready = inputs_at(done, step.action, stages);
    if (!ready) return false;
    const double cost = cost_of.at(static_cast<size_t>(step.action.kind));
    clock[rank] = std::max(clock[rank], *ready) + cost;
    done[step.action.key()] = clock[rank];
    out.busy += cost;
    return true;
  });
  out.time = *std::ranges::max_element(clock);
  return out;
}

// A table with more cells than this is not printed in error messages.
constexpr size_t kMaxPrintedCells = 4096;

template <class... Args>
[[noreturn]] void raise_invalid_table(const ScheduleTable& table, std::optional<size_t> column,
                                      fmt::format_string<Args...> format, Args&&... args) {
  size_t steps = 0;
  for (const auto& row : table.ranks) steps = std::max(steps, row.size());
  const bool shown = steps * table.ranks.size() <= kMaxPrintedCells;
  raise(ErrorKind::kConfig, "[pipeline.check] {}.{}{}", fmt::format(format, std::forward<Args>(args)...),
        shown ? " Full pipeline schedule:\n" : "", shown ? table.to_text(column) : "");
}

// Checks the actions of one rank. Each must be a computation, its stage and micro-batch must be within `extent`, and
// its stage must be on this rank alone. It must occur once, after the actions of the same stage and micro-batch that it
// needs. Records the rank of each stage in `rank_of` and each action in `seen`.
void check_rank(const ScheduleTable& table, size_t rank, const ScheduleExtent& extent, std::vector<int>& rank_of,
                std::set<Action::Key>& seen) {
  for (const auto& [step, column] : steps_of(table.ranks[rank])) {
    const auto text = step.text();
    if (!step.computes()) {
      raise_invalid_table(table, column,
                          "Expected compute-only schedule but found communication action '{}' at rank {}, position {}",
                          text, rank, column);
    }
    if (step.stage < 0 || step.stage >= extent.stages || step.micro_batch >= extent.micro_batches) {
      raise_invalid_table(table, column, "Rank {}, step {}: {} is outside of {} stages and {} microbatches", rank,
                          column, text, extent.stages, extent.micro_batches);
    }
    auto& home = rank_of[static_cast<size_t>(step.stage)];
    if (home >= 0 && home != static_cast<int>(rank)) {
      raise_invalid_table(table, column, "Rank {}, step {}: Stage {} is assigned to both rank {} and rank {}", rank,
                          column, step.stage, rank, home);
    }
    home = static_cast<int>(rank);
    const auto done = [&, &step = step](ActionKind kind) {
      return seen.contains({step.stage, kind, step.micro_batch});
    };
    const bool weight = step.kind == ActionKind::kWeightBackward;
    if (step.kind != ActionKind::kForward && !done(weight ? ActionKind::kInputBackward : ActionKind::kForward)) {
      raise_invalid_table(table, column,
                          "Rank {}, step {}: Running {} for stage {}, microbatch {} without first running {}", rank,
                          column,
                          weight                               ? "Backward Weight"
                          : step.kind == ActionKind::kBackward ? "Full Backward"
                                                               : "Backward Input",
                          step.stage, step.micro_batch, weight ? "Backward Input" : "Forward");
    }
    const bool again = (step.kind == ActionKind::kBackward && done(ActionKind::kInputBackward)) ||
                       (step.kind == ActionKind::kInputBackward && done(ActionKind::kBackward));
    if (again || !seen.insert(step.key()).second) {
      raise_invalid_table(table, column, "Rank {}, step {}: {} occurs a second time, expected once", rank, column,
                          text);
    }
  }
}

void check_complete(const ScheduleTable& table, const ScheduleExtent& extent, const std::set<Action::Key>& seen) {
  for (int stage = 0; stage < extent.stages; ++stage) {
    std::map<ActionKind, int> count;
    for (int mb = 0; mb < extent.micro_batches; ++mb) {
      for (const auto kind :
           {ActionKind::kForward, ActionKind::kBackward, ActionKind::kInputBackward, ActionKind::kWeightBackward}) {
        count[kind] += seen.contains({stage, kind, mb});
      }
    }
    const int forward = count[ActionKind::kForward], whole = count[ActionKind::kBackward],
              input = count[ActionKind::kInputBackward], weight = count[ActionKind::kWeightBackward];
    if (forward != extent.micro_batches) {
      raise_invalid_table(table, std::nullopt, "Got {} F microbatches for stage {}, expected {}", forward, stage,
                          extent.micro_batches);
    }
    if (input != weight) {
      raise_invalid_table(
          table, std::nullopt,
          "Invalid backward microbatches for stage {}: I and W must have equal counts, but got I={}, W={}", stage,
          input, weight);
    }
    if (whole + input != extent.micro_batches) {
      raise_invalid_table(
          table, std::nullopt,
          "Invalid backward microbatches for stage {}: expected {} total backwards, but got B={}, I={}, W={}", stage,
          extent.micro_batches, whole, input, weight);
    }
  }
}

}  // namespace

std::vector<int> check_schedule(const ScheduleTable& table, const ScheduleExtent& extent) {
  if (static_cast<int>(table.ranks.size()) != extent.ranks) {
    raise_invalid_table(table, std::nullopt, "Schedule has incorrect number of ranks - expected {}, actual {}",
                        extent.ranks, table.ranks.size());
  }
  // Refuses numbers of stages and micro-batches that are below 1 or too large for the table, before memory is allocated
  // for them. Each pair of a stage and a micro-batch has at least two computations, a forward and a backward. The check
  // allows four computations in each cell of the table; a cell really holds at most two (an overlap).
  int64_t cells = 0;
  for (const auto& row : table.ranks) cells += static_cast<int64_t>(row.size());
  if (extent.stages < 1 || extent.micro_batches < 1 || int64_t{extent.stages} * extent.micro_batches > 2 * cells) {
    raise_invalid_table(table, std::nullopt, "found {} cells, which cannot be a table of {} stages and {} microbatches",
                        cells, extent.stages, extent.micro_batches);
  }
  std::vector<int> rank_of(static_cast<size_t>(extent.stages), -1);
  std::set<Action::Key> seen;
  for (size_t rank = 0; rank < table.ranks.size(); ++rank) check_rank(table, rank, extent, rank_of, seen);
  check_complete(table, extent, seen);
  const auto timed_run = run_table(table, extent.stages, {});
  std::string waiting;
  std::optional<size_t> first_column;
  for (size_t rank = 0; rank < timed_run.rows.size(); ++rank) {
    if (timed_run.ran[rank] == timed_run.rows[rank].size()) continue;
    const auto& [step, column] = timed_run.rows[rank][timed_run.ran[rank]];
    if (!first_column) first_column = column;
    waiting += fmt::format("{}rank {} at {} (step {})", waiting.empty() ? "" : ", ", rank, step.text(), column);
  }
  if (!waiting.empty()) {
    raise_invalid_table(table, first_column, "Schedule is not progressing: these ranks wait for ever: {}", waiting);
  }
  return rank_of;
}

Simulation simulate(const Schedule& schedule, const ActionCosts& costs) {
  const auto timed_run = run_table(schedule.table, schedule.stages(), costs);
  Simulation out{
      .time = timed_run.time, .bubble_share = 1 - timed_run.busy / (timed_run.time * schedule.ranks()), .max_held = {}};
  // A rank holds the activations of a pair (stage, micro-batch) from the pair's F (forward) to its B (backward) or W
  // (weight backward). The number of held pairs follows from the order of the actions in the rank's row of `timed_run`;
  // the times of the actions are not needed.
  for (const auto& row : timed_run.rows) {
    int held = 0, max_held = 0;
    for (const auto& step : row) {
      const auto kind = step.action.kind;
      held += kind == ActionKind::kForward;
      max_held = std::max(max_held, held);
      held -= kind == ActionKind::kBackward || kind == ActionKind::kWeightBackward;
    }
    out.max_held.push_back(max_held);
  }
  return out;
}

namespace {

// Whether an action of a lowered table can run, given the actions that all ranks have run.
bool lowered_can_run(const Action& action, const std::set<Action::Key>& done, const std::vector<int>& rank_of) {
  const int stage = action.stage, mb = action.micro_batch, last = static_cast<int>(rank_of.size()) - 1;
  const auto has = [&](int of, ActionKind kind) { return done.contains({of, kind, mb}); };
  const auto gradient = [&](int of) { return has(of, ActionKind::kBackward) || has(of, ActionKind::kInputBackward); };
  const auto together = [&](int other) {
    return rank_of[static_cast<size_t>(stage)] == rank_of[static_cast<size_t>(other)];
  };
  switch (action.kind) {
    case ActionKind::kForward:
      if (stage == 0) return true;
      return together(stage - 1) ? has(stage - 1, ActionKind::kForward) : has(stage, ActionKind::kReceiveForward);
    case ActionKind::kBackward:
    case ActionKind::kInputBackward:
      if (!has(stage, ActionKind::kForward)) return false;
      if (stage == last) return true;
      return together(stage + 1) ? gradient(stage + 1) : has(stage, ActionKind::kReceiveBackward);
    case ActionKind::kWeightBackward:
      return has(stage, ActionKind::kInputBackward);
    case ActionKind::kSendForward:
      return has(stage, ActionKind::kForward);
    case ActionKind::kSendBackward:
      return gradient(stage);
    case ActionKind::kReceiveForward:
      return stage > 0 && has(stage - 1, ActionKind::kSendForward);
    case ActionKind::kReceiveBackward:
      return stage < last && has(stage + 1, ActionKind::kSendBackward);
    default:
      return true;
  }
}

}  // namespace

void check_lowered(const ScheduleTable& lowered, const std::vector<int>& rank_of, int micro_batches) {
  std::vector<std::vector<TableStep>> rows;
  std::map<ActionKind, int> count;
  for (const auto& row : lowered.ranks) {
    const auto rank = static_cast<int>(rows.size());
    for (const auto& each : rows.emplace_back(steps_of(row))) {
      const auto& step = each.action;
      const bool known =
          step.stage >= 0 && step.stage < static_cast<int>(rank_of.size()) && step.micro_batch < micro_batches;
      TESSERA_CHECK(known && rank_of[static_cast<size_t>(step.stage)] == rank, ErrorKind::kConfig,
                    "[pipeline.check] rank {}: {} belongs to another rank's stage, or its micro-batch is not one of {}",
                    rank, step.text(), micro_batches);
      ++count[step.kind];
    }
  }
  TESSERA_CHECK(count[ActionKind::kSendForward] == count[ActionKind::kReceiveForward] &&
                    count[ActionKind::kSendBackward] == count[ActionKind::kReceiveBackward],
                ErrorKind::kConfig,
                "[pipeline.check] found {} SEND_F and {} RECV_F, {} SEND_B and {} RECV_B, wanted one receive for each "
                "send",
                count[ActionKind::kSendForward], count[ActionKind::kReceiveForward], count[ActionKind::kSendBackward],
                count[ActionKind::kReceiveBackward]);
  // As in detail/execution.h, a send never blocks, and a receive can run only after its send. If every row runs to its
  // end in this simulation, the ranks cannot deadlock.
  std::set<Action::Key> done;
  const auto ran = detail::run_in_rounds(rows, [&](size_t rank, const TableStep& step) {
    if (!lowered_can_run(step.action, done, rank_of)) return false;
    const bool is_first = done.insert(step.action.key()).second;
    TESSERA_CHECK(is_first || step.action.micro_batch < 0, ErrorKind::kConfig,
                  "[pipeline.check] rank {}: {} occurs a second time, expected once", rank, step.action.text());
    return true;
  });
  std::string waiting;
  for (size_t rank = 0; rank < rows.size(); ++rank) {
    if (ran[rank] == rows[rank].size()) continue;
    waiting += fmt::format("{}rank {} at {}", waiting.empty() ? "" : ", ", rank, rows[rank][ran[rank]].action.text());
  }
  TESSERA_CHECK(waiting.empty(), ErrorKind::kConfig,
                "[pipeline.check] Schedule is not progressing: {} would wait for ever", waiting);
}

}  // namespace tessera::pipeline
