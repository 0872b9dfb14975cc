#include "tessera/parallel/detail/schedule.h"

#include "tessera/base/error.h"
#include "tessera/parallel/detail/group_node.h"

namespace tessera::parallel {

void Schedule::add(const std::shared_ptr<ParamGroup>& group) {
  group->join(pool_, &stats_);
  groups_.push_back(group);
}

bool Schedule::recomputing() const { return in_backward_ && inside_backward(); }

void Schedule::begin_forward() {
  if (recomputing()) return;
  if (in_forward_ || in_backward_) reset();
  in_forward_ = true;
  next_forward_order_.clear();
}

void Schedule::end_forward() {
  if (recomputing()) return;
  for (const auto& group : groups_) {
    if (group->gathering()) group->reshard();
  }
  forward_order_ = next_forward_order_;
  in_forward_ = false;
}

void Schedule::before_forward(ParamGroup& group) {
  group.start_unshard();
  group.finish_unshard();
  if (recomputing()) return;
  const size_t position = next_forward_order_.size();
  next_forward_order_.push_back(&group);
  const bool as_before = position + 1 < forward_order_.size() && forward_order_[position] == &group;
  if (prefetch_ && as_before) forward_order_[position + 1]->start_unshard();
}

ForwardRun Schedule::after_forward(ParamGroup* group) {
  ForwardRun run{post_forward_order_.size(), epoch_, 0};
  if (group != nullptr && !recomputing()) post_forward_order_.push_back(group);
  return run;
}

void Schedule::enter_backward() {
  if (in_backward_) return;
  in_backward_ = true;
  ++backward_;
  at_end_of_backward([self = shared_from_this()] { self->end_backward(); });
}

void Schedule::before_backward(ParamGroup* group, ForwardRun& run) {
  enter_backward();
  if (run.seen_backward == backward_) return;
  run.seen_backward = backward_;
  if (group == nullptr) return;
  group->start_unshard();
  group->finish_unshard();
  if (prefetch_ && run.epoch == epoch_ && run.position > 0 && run.position <= post_forward_order_.size()) {
    post_forward_order_[run.position - 1]->start_unshard();
  }
}

void Schedule::start_reduction(ParamGroup& group) {
  if (!group.synchronize) return;
  if (!group.reducer().start(group.divide, group.name())) return;
  if (group.mesh()->size(group.mesh()->ndim() - 1) > 1) ++stats_.reduce_scatters;
  reducing_.push_back(&group);
}

void Schedule::after_backward(ParamGroup& group) {
  enter_backward();
  group.reshard();
  std::erase_if(reducing_, [](ParamGroup* other) { return !other->reducer().advance(other->name()); });
  start_reduction(group);
}

void Schedule::end_backward() {
  for (const auto& group : groups_) group->reshard();
  // Gradients of earlier backwards without synchronisation whose group this backward did not reach.
  for (const auto& group : groups_) start_reduction(*group);
  for (auto* group : reducing_) group->reducer().finish(group->name());
  reducing_.clear();
  post_forward_order_.clear();
  ++epoch_;
  in_backward_ = false;
}

// After an exception: everything is freed and unfinished gradients are forgotten.
void Schedule::reset() {
  reducing_.clear();
  for (const auto& group : groups_) {
    try {
      group->reshard();
    } catch (const Error&) {  // of the gather that failed; the user has had it
    }
    group->reducer().drop();
  }
  forward_order_.clear();
  post_forward_order_.clear();
  ++epoch_;
  in_forward_ = in_backward_ = false;
}

}  // namespace tessera::parallel
