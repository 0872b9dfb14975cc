#include "tessera/parallel/pipeline/lowering.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "tessera/base/error.h"
#include "tessera/parallel/pipeline/detail/rounds.h"

namespace tessera::pipeline {
namespace {

// Returns the next `count` different stages on which the actions of `row` compute, in order, beginning with the action
// at `first`. The result may have count + 1 stages, because an overlap (kOverlap) may add two stages at once.
std::vector<int> next_stages(const ActionRow& row, size_t first, int count) {
  std::vector<int> out;
  for (size_t i = first; i < row.size() && static_cast<int>(out.size()) < count; ++i) {
    if (!row[i]) continue;
    for (const auto& step : row[i]->steps()) {
      if (std::ranges::find(out, step.stage) == out.end()) out.push_back(step.stage);
    }
  }
  return out;
}

// The stage that needs the result of the action and is on another rank; nullopt if there is none.
std::optional<int> receiver_of(const Action& action, const std::vector<int>& rank_of) {
  const bool forward = action.kind == ActionKind::kForward;
  const bool backward = action.kind == ActionKind::kBackward || action.kind == ActionKind::kInputBackward;
  if (!forward && !backward) return std::nullopt;
  const int to = action.stage + (forward ? 1 : -1);
  if (to < 0 || to == static_cast<int>(rank_of.size())) return std::nullopt;
  if (rank_of[static_cast<size_t>(action.stage)] == rank_of[static_cast<size_t>(to)]) return std::nullopt;
  return to;
}

// Whether the input that `action` needs from the stage before or after its own is available on this rank: the action
// that computes this input, or the RECV that receives it, is already in this rank's row. `done` has the keys of the
// actions in the row so far. True for an action that needs no such input.
bool has_inputs(const Action& action, const std::set<Action::Key>& done, int stages) {
  const int stage = action.stage, mb = action.micro_batch;
  const auto has = [&](int of, ActionKind kind) { return done.contains({of, kind, mb}); };
  if (action.kind == ActionKind::kForward) {
    return stage == 0 || has(stage, ActionKind::kReceiveForward) || has(stage - 1, ActionKind::kForward);
  }
  if (action.kind == ActionKind::kBackward || action.kind == ActionKind::kInputBackward) {
    return stage == stages - 1 || has(stage, ActionKind::kReceiveBackward) ||
           has(stage + 1, ActionKind::kInputBackward) || has(stage + 1, ActionKind::kBackward);
  }
  return true;
}

ScheduleTable table_of(const std::vector<Actions>& rows) {
  ScheduleTable table;
  for (const auto& row : rows) table.ranks.emplace_back(row.begin(), row.end());
  return table;
}

}  // namespace

// A stage is freed before the next one is gathered, so about `max_active` stages are unsharded at a time.
Actions add_unshard_reshard(const ActionRow& row, int max_active) {
  std::set<int> active;
  Actions out;
  for (size_t i = 0; i < row.size(); ++i) {
    if (!row[i]) continue;
    const auto next_active = next_stages(row, i, max_active);
    for (auto stage = active.begin(); stage != active.end();) {
      if (std::ranges::find(next_active, *stage) != next_active.end()) {
        ++stage;
        continue;
      }
      out.push_back({.stage = *stage, .kind = ActionKind::kReshard});
      stage = active.erase(stage);
    }
    for (const int stage : next_active) {
      if (active.insert(stage).second) out.push_back({.stage = stage, .kind = ActionKind::kUnshard});
    }
    out.push_back(*row[i]);
  }
  for (const int stage : active) out.push_back({.stage = stage, .kind = ActionKind::kReshard});
  return out;
}

// A stage has one B or W for each micro-batch, so the count of both says when its gradients are complete.
Actions add_reduce_grad(const Actions& row, int micro_batches) {
  std::map<int, int> count;
  Actions out;
  for (const auto& action : row) {
    out.push_back(action);
    for (const auto& step : action.steps()) {
      const bool completes_gradient = step.kind == ActionKind::kBackward || step.kind == ActionKind::kWeightBackward;
      if (!completes_gradient || ++count[step.stage] != micro_batches) continue;
      out.push_back({.stage = step.stage, .kind = ActionKind::kReduceGrad});
    }
  }
  return out;
}

Actions merge_bw(const ActionRow& row) {
  Actions out;
  for (const auto& cell : row) {
    if (!cell) continue;
    const bool weight = cell->kind == ActionKind::kWeightBackward && !out.empty();
    if (weight && out.back().kind == ActionKind::kInputBackward && out.back().stage == cell->stage &&
        out.back().micro_batch == cell->micro_batch) {
      out.back().kind = ActionKind::kBackward;
    } else {
      out.push_back(*cell);
    }
  }
  return out;
}

// When an action is added to a row, its SEND is added after it, and the RECV is appended to the receiver's row at once.
// Both rows thus list the messages between two ranks in the same order. NCCL needs this, because it matches messages by
// their order, not by a tag.
std::vector<Actions> add_send_recv(const std::vector<Actions>& rows, const std::vector<int>& rank_of) {
  std::vector<Actions> out(rows.size());
  std::vector<std::set<Action::Key>> done(rows.size());
  const auto add = [&](size_t rank, Action action) {
    done[rank].insert(action.key());
    out[rank].push_back(std::move(action));
  };
  const auto stages = static_cast<int>(rank_of.size());
  const auto ran = detail::run_in_rounds(rows, [&](size_t rank, const Action& action) {
    const auto steps = action.steps();
    const auto can_run = [&](const Action& step) { return has_inputs(step, done[rank], stages); };
    if (!std::ranges::all_of(steps, can_run)) return false;
    out[rank].push_back(action);
    for (const auto& step : steps) {
      done[rank].insert(step.key());
      const auto to = receiver_of(step, rank_of);
      if (!to) continue;
      const bool forward = step.kind == ActionKind::kForward;
      add(rank, {.stage = step.stage,
                 .kind = forward ? ActionKind::kSendForward : ActionKind::kSendBackward,
                 .micro_batch = step.micro_batch});
      add(static_cast<size_t>(rank_of[static_cast<size_t>(*to)]),
          {.stage = *to,
           .kind = forward ? ActionKind::kReceiveForward : ActionKind::kReceiveBackward,
           .micro_batch = step.micro_batch});
    }
    return true;
  });
  for (size_t rank = 0; rank < rows.size(); ++rank) {
    TESSERA_CHECK(
        ran[rank] == rows[rank].size(), ErrorKind::kConfig,
        "[pipeline.lower] Malformed compute schedule, can't schedule sends/recvs: rank {} waits for ever at {}", rank,
        rows[rank][ran[rank]].text());
  }
  return out;
}

// Sends and receives are added last: add_send_recv() simulates the rows of all ranks, so all other actions must already
// be in these rows, in their final order.
ScheduleTable lower(const Schedule& schedule) {
  std::vector<Actions> rows;
  for (const auto& row : schedule.table.ranks) {
    rows.push_back(add_reduce_grad(add_unshard_reshard(row), schedule.micro_batches));
  }
  return table_of(add_send_recv(rows, schedule.rank_of));
}

ScheduleTable lower_forward(const std::vector<int>& rank_of, int ranks, int micro_batches) {
  std::vector<Actions> rows(static_cast<size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    for (const int stage : stages_of_rank(rank_of, rank)) {
      for (int mb = 0; mb < micro_batches; ++mb) {
        rows[static_cast<size_t>(rank)].push_back({.stage = stage, .kind = ActionKind::kForward, .micro_batch = mb});
      }
    }
  }
  return table_of(add_send_recv(rows, rank_of));
}

}  // namespace tessera::pipeline
