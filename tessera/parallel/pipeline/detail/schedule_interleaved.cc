#include <algorithm>
#include <map>

#include "tessera/base/error.h"
#include "tessera/parallel/pipeline/detail/schedule_makers.h"

namespace tessera::pipeline::detail {
namespace {

// Builds the row of one rank of an interleaved schedule as torch's _get_1f1b_rank_ops does: warm-up forwards, then
// forwards and backwards in turn, then the remaining backwards. The rank runs per_round_ micro-batches of one of its
// stages, then as many of the next stage, and so on; backwards start with the last stage. The zero-bubble form splits
// backward into I and W, and delays the first W by `rank` backwards.
class InterleavedRank {
 public:
  InterleavedRank(const ScheduleSize& size, int rank, bool zero_bubble)
      : ranks_(size.ranks), local_(size.stages_per_rank), rank_(rank), zero_bubble_(zero_bubble) {
    const int rounds = std::max(1, size.micro_batches / ranks_);
    per_round_ = size.micro_batches / rounds;
    // The warm-up forwards of a rank are: per_round_ forwards for each of its stages but the last, and for each rank
    // after this one two forwards in 1F1B and one in zero bubble.
    const int warmups_needed = (local_ - 1) * per_round_ + (zero_bubble ? 1 : 2) * (ranks_ - 1 - rank);
    warmup_ = std::min(warmups_needed, size.micro_batches * local_);
    total_ = size.micro_batches * local_;
  }

  ActionRow row() {
    add_bubbles(rank_);
    for (int op = 0; op < warmup_ + total_; ++op) {
      if (op < total_) forward(op);
      if (op < warmup_) {
        if (op == warmup_ - 1) add_bubbles(wait_for_first_backward());
        continue;
      }
      if (op >= total_ && !zero_bubble_) add_bubbles(1);
      backward(op);
    }
    while (zero_bubble_ && weights_done_ < total_) weight();
    return std::move(row_);
  }

 private:
  void add_bubbles(int count) { row_.resize(row_.size() + static_cast<size_t>(std::max(count, 0))); }
  int wait_for_first_backward() const {
    if (zero_bubble_) return ranks_ - rank_ - 1;
    return local_ * ranks_ + 2 * (ranks_ - 1 - rank_) - (warmup_ + rank_);
  }
  int backward_stage(int op) const {
    const int local = local_ - 1 - ((op - warmup_) / per_round_) % local_;
    return local * ranks_ + rank_;
  }
  void add_next(int stage, ActionKind kind, std::map<int, int>& next) {
    row_.push_back(Action{.stage = stage, .kind = kind, .micro_batch = next[stage]++});
  }
  void forward(int op) { add_next((op / per_round_) % local_ * ranks_ + rank_, ActionKind::kForward, forwards_); }
  void backward(int op) {
    add_next(backward_stage(op), zero_bubble_ ? ActionKind::kInputBackward : ActionKind::kBackward, backwards_);
    if (zero_bubble_ && op - warmup_ >= rank_) weight();
  }
  void weight() { add_next(backward_stage(warmup_ + weights_done_++), ActionKind::kWeightBackward, weights_); }

  int ranks_, local_, rank_;
  bool zero_bubble_;
  int per_round_ = 1, warmup_ = 0, total_ = 0, weights_done_ = 0;
  std::map<int, int> forwards_, backwards_, weights_;  // next micro-batch of each stage
  ActionRow row_;
};

}  // namespace

ScheduleRows interleaved_rows(const ScheduleSize& size, bool zero_bubble) {
  const int rounds = std::max(1, size.micro_batches / size.ranks);
  TESSERA_CHECK(size.micro_batches % rounds == 0, ErrorKind::kConfig,
                "[pipeline.schedule] {} requires the number of microbatches to be a multiple of the number of rounds "
                "({}), but got {}.",
                zero_bubble ? "Zero bubble" : "Interleaved 1F1B", rounds, size.micro_batches);
  ScheduleRows rows;
  for (int rank = 0; rank < size.ranks; ++rank) rows.push_back(InterleavedRank(size, rank, zero_bubble).row());
  return zero_bubble ? with_bubbles(rows, /*one_stage_per_rank=*/false) : rows;
}

}  // namespace tessera::pipeline::detail
