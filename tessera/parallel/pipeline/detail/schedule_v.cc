#include <algorithm>
#include <deque>
#include <map>

#include "tessera/base/error.h"
#include "tessera/parallel/pipeline/detail/schedule_makers.h"

namespace tessera::pipeline::detail {
namespace {

// Builds the row of one rank of a V schedule. The rank has two stages. Way 0 is its stage on the way from the first to
// the last rank, and way 1 its stage on the way back. done_ counts the actions of each way and kind, so the count is
// the next micro-batch. A whole backward (B) is counted as an I and a W.
class VRow {
 public:
  VRow(int ranks, int rank) : stages_{rank, 2 * ranks - 1 - rank} {}

  void add_bubbles(int count) { row_.resize(row_.size() + static_cast<size_t>(count)); }
  void forward(int way) { row_.push_back(next(way, ActionKind::kForward)); }
  void input(int way) {
    row_.push_back(next(way, ActionKind::kInputBackward));
    waiting_.push_back(*row_.back());
  }
  void weight(int way) { row_.push_back(next(way, ActionKind::kWeightBackward)); }
  void whole_backward(int way) { row_.push_back(next_whole(way)); }
  void overlap(int forward_way, int backward_way) {
    Action both{.kind = ActionKind::kOverlap};
    both.parts.push_back(next(forward_way, ActionKind::kForward));
    both.parts.push_back(next_whole(backward_way));
    row_.push_back(std::move(both));
  }
  // Adds the W of the oldest I that has no W yet, if there is one.
  void oldest_weight() {
    if (waiting_.empty()) return;
    row_.push_back(waiting_.front());
    row_.back()->kind = ActionKind::kWeightBackward;
    waiting_.pop_front();
  }
  int done(int way, ActionKind kind) const {
    const auto found = done_.find({way, kind});
    return found == done_.end() ? 0 : found->second;
  }
  ActionRow take() { return std::move(row_); }

 private:
  Action next(int way, ActionKind kind) {
    return {.stage = stages_[way], .kind = kind, .micro_batch = done_[{way, kind}]++};
  }
  Action next_whole(int way) {
    Action action = next(way, ActionKind::kInputBackward);
    action.kind = ActionKind::kBackward;
    ++done_[{way, ActionKind::kWeightBackward}];
    return action;
  }

  int stages_[2];
  std::map<std::pair<int, ActionKind>, int> done_;
  std::deque<Action> waiting_;  // the I actions whose W is still to come
  ActionRow row_;
};

void input_and_weight(VRow& row, int way) {
  row.input(way);
  row.weight(way);
}

// Returns the row of rank `rank` in a schedule like torch's ScheduleZBVZeroBubble. The row is built for at least 2 *
// ranks - 1 micro-batches, the number that fills the pipeline. At the end of this function, actions of micro-batches
// that do not exist (size.micro_batches and above) become bubbles.
ActionRow zbv_row(const ScheduleSize& size, int rank) {
  const int ranks = size.ranks, micro_batches = std::max(2 * ranks - 1, size.micro_batches);
  VRow row(ranks, rank);
  const auto done = [&](int way, ActionKind kind) { return row.done(way, kind); };
  // Warm-up: forwards of way 0 (this rank's stage on the way to the last rank), until the first micro-batch comes back
  // to this rank's stage of way 1 (on the way back). Then forwards of way 1 and of way 0 in turn.
  row.add_bubbles(rank);
  for (int i = 0; i < 2 * (ranks - rank) - 1; ++i) row.forward(0);
  for (int i = 0; i < rank; ++i) {
    row.forward(1);
    row.forward(0);
  }
  // The backwards of way 1 (this rank's stage on the way back) begin: an I and a W of way 1 follow each forward of way
  // 1.
  for (int i = 0; i < ranks - rank; ++i) {
    row.forward(1);
    input_and_weight(row, 1);
  }
  // Steady state: F (forward), I (input backward) and W (weight backward) of way 0, this rank's stage on the way to the
  // last rank; then F, I and W of way 1, its stage on the way back.
  while (done(1, ActionKind::kForward) < done(0, ActionKind::kForward) ||
         done(0, ActionKind::kForward) < micro_batches) {
    if (done(0, ActionKind::kForward) < micro_batches) row.forward(0);
    input_and_weight(row, 0);
    row.forward(1);
    input_and_weight(row, 1);
  }
  // The end of this rank's row, after all forwards. I is an input backward, W a weight backward. Way 0 is this rank's
  // stage on the way to the last rank, way 1 its stage on the way back. The row gets `rank` times an I of way 0 and an
  // I of way 1, then ranks - rank times an I and a W of way 0, then the W actions that are still missing, those of way
  // 1 first.
  for (int i = 0; i < rank; ++i) {
    row.input(0);
    row.input(1);
  }
  for (int i = 0; i < ranks - rank; ++i) input_and_weight(row, 0);
  for (const int way : {1, 0}) {
    while (done(way, ActionKind::kWeightBackward) < done(way, ActionKind::kInputBackward)) row.weight(way);
  }
  auto actions = row.take();
  for (auto& action : actions) {
    if (action && action->micro_batch >= size.micro_batches) action.reset();
  }
  return actions;
}

// The eight steps of torch's ScheduleDualPipeV. From the middle of step 6 on, backwards are split into I and W, and the
// W actions fill the bubbles at the end.
ActionRow dual_pipe_v_row(const ScheduleSize& size, int rank) {
  const int ranks = size.ranks, behind = ranks - rank - 1;
  VRow row(ranks, rank);
  // Steps 1 and 2, the warm-up: first only forwards of way 0 (this rank's stage on the way to the last rank), then
  // forwards of way 0 and of way 1 (this rank's stage on the way back) in turn.
  for (int i = 0; i < 2 * behind; ++i) row.forward(0);
  for (int i = 0; i <= rank; ++i) {
    row.forward(0);
    row.forward(1);
  }
  // Step 3: in turn an input backward (I), a weight backward (W) and a forward (F), all on way 1 (this rank's stage on
  // the way back from the last to the first rank).
  for (int i = 0; i < behind; ++i) {
    row.input(1);
    row.oldest_weight();
    row.forward(1);
  }
  // Step 4, the steady state: in turn a forward of way 0 (this rank's stage on the way to the last rank) overlaps a
  // backward of way 1 (its stage on the way back), and a forward of way 1 overlaps a backward of way 0.
  for (int i = 0; i < size.micro_batches - 2 * ranks + rank + 1; ++i) {
    if (i == 0 && behind == 0) {  // an overlap would make the bubble larger here
      row.forward(0);
      row.whole_backward(1);
    } else {
      row.overlap(0, 1);
    }
    row.overlap(1, 0);
  }
  // Step 5: the last forwards of way 1 (this rank's stage on the way back from the last to the first rank). Each of
  // them overlaps a backward of way 0 (its stage on the way to the last rank) and follows a backward of way 1.
  for (int i = 0; i < behind; ++i) {
    row.whole_backward(1);
    row.overlap(1, 0);
  }
  // Step 6: in turn a backward of way 1 (this rank's stage on the way back from the last to the first rank) and a
  // backward of way 0 (its stage on the way to the last rank). In the first half of this step they are whole backwards
  // (B). In the second half they are input backwards (I), whose weight backwards (W) follow in steps 7 and 8.
  bool split = false;
  const auto backward = [&](int way) { split ? row.input(way) : row.whole_backward(way); };
  for (int i = 0; i <= rank; ++i) {
    const bool half = i == (rank + 1) / 2;
    split = split || (half && rank % 2 == 1);
    backward(1);
    split = split || (half && rank % 2 == 0);
    backward(0);
  }
  // Steps 7 and 8: the W actions (weight backwards) that remain. In step 7 each W is followed by one of the last I
  // actions (input backwards) of way 0, which is this rank's stage on the way to the last rank.
  for (int i = 0; i < behind; ++i) {
    row.oldest_weight();
    backward(0);
  }
  for (int i = 0; i <= rank; ++i) row.oldest_weight();
  return row.take();
}

}  // namespace

ScheduleRows zbv_rows(const ScheduleSize& size) {
  ScheduleRows rows;
  for (int rank = 0; rank < size.ranks; ++rank) rows.push_back(zbv_row(size, rank));
  return rows;
}

ScheduleRows dual_pipe_v_rows(const ScheduleSize& size) {
  TESSERA_CHECK(size.micro_batches >= 2 * size.ranks, ErrorKind::kConfig,
                "[pipeline.schedule] DualPipeV requires at least as many microbatches as stages, but got {} "
                "microbatches and {} stages.",
                size.micro_batches, 2 * size.ranks);
  ScheduleRows rows;
  for (int rank = 0; rank < size.ranks; ++rank) rows.push_back(dual_pipe_v_row(size, rank));
  return rows;
}

}  // namespace tessera::pipeline::detail
