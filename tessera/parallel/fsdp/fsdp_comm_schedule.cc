#include "tessera/parallel/fsdp/fsdp_comm_schedule.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/parallel/data_parallel/gradient_nodes.h"

namespace tessera {

void FsdpCommSchedule::add(const std::shared_ptr<ShardedParamGroup>& group) {
  if (!streams_) streams_ = std::make_shared<CommStreams>(group->device());
  group->join(pool_, streams_, &stats_);
  groups_.push_back(group);
}

// Whether the running forward is a recomputation. in_backward_ alone does not show this: after an exception in backward
// it stays set, although the next forward is not a recomputation. A recomputation runs inside the autograd engine.
bool FsdpCommSchedule::recomputing() const { return in_backward_ && inside_backward(); }

void FsdpCommSchedule::begin_forward() {
  if (recomputing()) return;
  if (in_forward_ || in_backward_) reset();
  reshard_stale_groups();
  if (streams_ && streams_->gather.exists()) {
    streams_->gather.wait_current_stream();  // after the optimizer's writes to the shards
    for (const auto& group : groups_) group->mark_shards_ordered();
  }
  in_forward_ = true;
  next_forward_order_.clear();
}

// A write may change the shard of one rank and not that of another. All ranks must gather the same groups again, so an
// all-reduce (max) makes a group stale on all ranks if its shard changed on any rank.
void FsdpCommSchedule::reshard_stale_groups() {
  std::vector<std::pair<comm::Group*, std::vector<ShardedParamGroup*>>> kept;  // in the same order on all ranks
  for (const auto& group : groups_) {
    if (!group->may_be_stale()) continue;
    auto* ranks = &group->ranks();
    auto found = std::ranges::find_if(kept, [&](const auto& each) { return each.first == ranks; });
    if (found == kept.end()) found = kept.insert(kept.end(), {ranks, {}});
    found->second.push_back(group.get());
  }
  for (const auto& [ranks, groups] : kept) {
    at::Tensor changed = at::zeros({static_cast<int64_t>(groups.size())}, at::kInt);
    for (size_t i = 0; i < groups.size(); ++i) changed.mutable_data_ptr<int>()[i] = groups[i]->changed();
    comm::all_reduce(*ranks, changed, comm::ReduceOp::kMax, "changed shards").wait();
    for (size_t i = 0; i < groups.size(); ++i) {
      if (changed.const_data_ptr<int>()[i] != 0) groups[i]->reshard();
    }
  }
}

void FsdpCommSchedule::end_forward() {
  if (recomputing()) return;
  for (const auto& group : groups_) {
    if (group->is_gathering()) group->reshard();
  }
  if (streams_) streams_->free_retired();
  forward_order_ = next_forward_order_;
  in_forward_ = false;
}

void FsdpCommSchedule::before_forward(ShardedParamGroup& group) {
  group.start_unshard();
  group.finish_unshard();
  if (recomputing()) return;
  const size_t position = next_forward_order_.size();
  next_forward_order_.push_back(&group);
  // The next group is prefetched only while this forward visits the groups in the order of the last forward. A wrong
  // prediction costs an unused all-gather. All ranks run the same modules, so all ranks prefetch the same groups.
  const bool as_before = position + 1 < forward_order_.size() && forward_order_[position] == &group;
  if (prefetch_ && as_before) forward_order_[position + 1]->start_unshard();
}

// post_forward_order_ holds the groups in the order in which their forwards end; backward needs them in reverse order.
// ForwardRecord::position is the index of this forward in post_forward_order_.
ForwardRecord FsdpCommSchedule::after_forward(ShardedParamGroup* group) {
  ForwardRecord record{post_forward_order_.size(), epoch_, 0, recomputing()};
  if (group != nullptr && !record.recomputed) post_forward_order_.push_back(group);
  return record;
}

void FsdpCommSchedule::enter_backward() {
  if (in_backward_) return;
  in_backward_ = true;
  ++backward_;
  recompute_position_ = forward_order_.size();
  at_end_of_backward([self = shared_from_this()] { self->end_backward(); });
}

void FsdpCommSchedule::before_backward(ShardedParamGroup* group, ForwardRecord& record) {
  enter_backward();
  // Every output of the module has a hook that calls this function; only the first call in each backward has an effect.
  if (record.seen_backward == backward_) return;
  record.seen_backward = backward_;
  if (group == nullptr) return;
  group->start_unshard();
  group->finish_unshard();
  if (!prefetch_) return;
  if (auto* next = next_in_backward(*group, record)) next->start_unshard();
}

// The group that backward will probably need after `group`; null if that is unknown.
ShardedParamGroup* FsdpCommSchedule::next_in_backward(const ShardedParamGroup& group, const ForwardRecord& record) {
  if (!record.recomputed) {
    const bool known = record.epoch == epoch_ && record.position > 0 && record.position <= post_forward_order_.size();
    return known ? post_forward_order_[record.position - 1] : nullptr;
  }
  // A checkpointed module is not in post_forward_order_, because its first forward built no graph. It is in
  // forward_order_. Backward recomputes modules from the end of forward_order_, and recompute_position_ is the position
  // of the last module that it has recomputed.
  for (size_t position = std::min(recompute_position_, forward_order_.size()); position-- > 0;) {
    if (forward_order_[position] != &group) continue;
    recompute_position_ = position;
    return position > 0 ? forward_order_[position - 1] : nullptr;
  }
  return nullptr;
}

void FsdpCommSchedule::start_reduction(ShardedParamGroup& group) {
  if (!group.synchronize) return;
  if (!group.start_reduction()) return;
  if (group.ranks().size() > 1) ++stats_.reduce_scatters;
  reducing_.push_back(&group);
}

// When the gradients of a group are complete, all reductions in flight advance by one stage: each stage has then
// overlapped the backward of one group.
void FsdpCommSchedule::after_backward(ShardedParamGroup& group) {
  enter_backward();
  if (group.reshard_after_backward) group.reshard();
  std::erase_if(reducing_, [](ShardedParamGroup* other) { return !other->advance_reduction(/*at_end=*/false); });
  start_reduction(group);
}

void FsdpCommSchedule::finish_reductions() {
  for (auto* group : reducing_) {
    while (group->advance_reduction(/*at_end=*/true)) {
    }
  }
  reducing_.clear();
}

void FsdpCommSchedule::reduce_accumulated() {
  for (const auto& group : groups_) start_reduction(*group);
  finish_reductions();
}

void FsdpCommSchedule::end_backward() {
  for (const auto& group : groups_) {
    if (group->reshard_after_backward || group->is_gathering()) group->reshard();
  }
  if (streams_) streams_->free_retired();
  // start_reduction() is called for all groups: a group that this backward did not reach may have gradients that
  // earlier backwards accumulated while reduction was off (ShardedParamGroup::synchronize).
  for (const auto& group : groups_) start_reduction(*group);
  if (is_last_backward_) {
    finish_reductions();
    post_forward_order_.clear();
    ++epoch_;
  }
  in_backward_ = false;
}

// After an exception: frees all groups and discards unfinished gradients.
void FsdpCommSchedule::reset() {
  reducing_.clear();
  for (const auto& group : groups_) {
    try {
      group->reshard();
    } catch (const Error&) {  // the failed gather; its error has been thrown already
    }
    group->drop_gradients();
  }
  if (streams_) streams_->free_retired();
  forward_order_.clear();
  recompute_position_ = 0;
  post_forward_order_.clear();
  ++epoch_;
  in_forward_ = in_backward_ = false;
}

}  // namespace tessera
