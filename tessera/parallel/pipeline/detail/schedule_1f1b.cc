#include <set>

#include "tessera/base/error.h"
#include "tessera/parallel/pipeline/detail/schedule_makers.h"

namespace tessera::pipeline::detail {
namespace {

void add_bubbles(ActionRow& row, int count) { row.resize(row.size() + static_cast<size_t>(count)); }

void add_step(ActionRow& row, int stage, ActionKind kind, int micro_batch) {
  row.push_back(Action{.stage = stage, .kind = kind, .micro_batch = micro_batch});
}

}  // namespace

// Simulates one time step per iteration. Results of a time step are visible from the next one on (`now` is merged at
// its end), so a rank sees its neighbour's result one step later.
ScheduleRows with_bubbles(const ScheduleRows& rows, bool one_stage_per_rank) {
  ScheduleRows out(rows.size());
  std::vector<size_t> next(rows.size(), 0);
  std::set<Action::Key> done;
  const auto can_run = [&](const Action& action) {
    const bool forward = action.kind == ActionKind::kForward;
    if (!forward && !one_stage_per_rank) return true;
    const int first = forward ? 0 : static_cast<int>(rows.size()) - 1;  // the stage without an input from another stage
    return action.stage == first || done.contains({action.stage + (forward ? -1 : 1), action.kind, action.micro_batch});
  };
  for (bool more = true; more;) {
    more = false;
    std::vector<Action::Key> now;
    for (size_t rank = 0; rank < rows.size(); ++rank) {
      if (next[rank] == rows[rank].size()) continue;
      more = true;
      const auto& action = rows[rank][next[rank]];
      const bool runs = !action || can_run(*action);
      out[rank].push_back(runs ? action : std::nullopt);
      if (!runs) continue;
      if (action) now.push_back(action->key());
      ++next[rank];
    }
    done.insert(now.begin(), now.end());
  }
  return out;
}

// The order in which torch's Schedule1F1B runs its actions. (It differs from torch's table for Schedule1F1B, whose last
// rank begins with micro-batch 1.) Rank r runs ranks - 1 - r warm-up forwards, then one forward and one backward in
// turn.
ScheduleRows one_forward_one_backward_rows(const ScheduleSize& size) {
  const int n = size.micro_batches, ranks = size.ranks;
  TESSERA_CHECK(n >= ranks, ErrorKind::kConfig,
                "[pipeline.schedule] 1F1B: Number of microbatches ({}) must be greater than or equal to the number of "
                "stages ({}).",
                n, ranks);
  ScheduleRows rows;
  for (int rank = 0; rank < ranks; ++rank) {
    ActionRow row;
    int forward = 0, backward = 0;
    while (forward < ranks - 1 - rank) add_step(row, rank, ActionKind::kForward, forward++);
    while (backward < n) {
      if (forward < n) add_step(row, rank, ActionKind::kForward, forward++);
      add_step(row, rank, ActionKind::kBackward, backward++);
    }
    rows.push_back(std::move(row));
  }
  return with_bubbles(rows, /*one_stage_per_rank=*/true);
}

// Each row has all forwards and then all backwards. Rank r starts with r bubbles, while the first hidden state passes
// the ranks before it. Before its first backward it has 2 * (ranks - 1 - r) bubbles, for the forwards and backwards of
// the ranks after it.
ScheduleRows forwards_then_backwards_rows(const ScheduleSize& size, bool last_first) {
  ScheduleRows rows;
  for (int rank = 0; rank < size.ranks; ++rank) {
    ActionRow row;
    add_bubbles(row, rank);
    for (int local = 0; local < size.stages_per_rank; ++local) {
      for (int mb = 0; mb < size.micro_batches; ++mb) {
        add_step(row, local * size.ranks + rank, ActionKind::kForward, mb);
      }
    }
    add_bubbles(row, 2 * (size.ranks - 1 - rank));
    for (int local = size.stages_per_rank - 1; local >= 0; --local) {
      for (int i = 0; i < size.micro_batches; ++i) {
        const int mb = last_first ? size.micro_batches - 1 - i : i;
        add_step(row, local * size.ranks + rank, ActionKind::kBackward, mb);
      }
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace tessera::pipeline::detail
