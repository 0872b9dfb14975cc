// When the groups below one root are gathered, freed and reduced.
//
// Forward: gather a group at its forward (and start the gather of the one that followed it last time), free it after.
// Backward: gather it when the gradient of its output is known (and start the one before it in forward), free it and
// start its reduction once all its gradients are there; the reduction before is finished then, the last one when
// backward ends. So at most two groups and the root are unsharded at once. An exception leaves a state that the next
// forward of the root clears. Belongs to one rank.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/parallel/fsdp/fully_shard.h"
#include "tessera/parallel/fsdp/gathered_group.h"

namespace tessera {

// One forward of one sharded module, as its backward hooks see it.
struct ForwardRun {
  size_t position = 0;         // in the post-forward order
  uint64_t epoch = 0;          // of that order
  uint64_t seen_backward = 0;  // the backward whose start this run has noticed already
  bool recomputed = false;     // inside a backward, in place of one whose results were not kept
};

class GatherSchedule : public std::enable_shared_from_this<GatherSchedule> {
 public:
  // prefetch: the same on all ranks.
  explicit GatherSchedule(bool prefetch) : prefetch_(prefetch) {}
  void add(const std::shared_ptr<GatheredGroup>& group);

  // Of the root. Groups that stayed gathered although shards have changed since are freed. COLLECTIVE over the shard
  // dim of the groups that stayed gathered, which are the same on all ranks.
  void begin_forward();
  void end_forward();  // of the root; frees what was gathered ahead for nothing
  void before_forward(GatheredGroup& group);
  // Records the order for backward; the group may be null.
  ForwardRun after_forward(GatheredGroup* group);
  void before_backward(GatheredGroup* group, ForwardRun& run);
  void after_backward(GatheredGroup& group);
  bool recomputing() const;  // a forward inside a backward
  // What backwards without synchronisation have left, of the groups that synchronise; until it is in place. COLLECTIVE
  // as a backward's reductions.
  void reduce_accumulated();

  void set_prefetch(bool on) { prefetch_ = on; }
  // false: a backward leaves its reductions under way, to be finished by the last one.
  void set_is_last_backward(bool on) { is_last_backward_ = on; }
  FsdpStats& stats() { return stats_; }

 private:
  void enter_backward();
  void end_backward();
  void reset();
  void start_reduction(GatheredGroup& group);
  void finish_reductions();
  void free_stale();
  GatheredGroup* next_in_backward(const GatheredGroup& group, const ForwardRun& run);

  bool prefetch_;
  std::shared_ptr<BufferPool> pool_ = std::make_shared<BufferPool>();
  std::shared_ptr<CommStreams> streams_;  // of the device of the first group
  FsdpStats stats_;
  std::vector<std::shared_ptr<GatheredGroup>> groups_;
  std::vector<GatheredGroup*> forward_order_;       // of the forward before
  std::vector<GatheredGroup*> next_forward_order_;  // of this one, so far
  std::vector<GatheredGroup*> post_forward_order_;
  size_t recomputed_ = 0;  // of forward_order_: what lies behind has been computed again in this backward
  std::vector<GatheredGroup*> reducing_;  // in flight, oldest first
  uint64_t epoch_ = 1;
  uint64_t backward_ = 0;
  bool in_forward_ = false;
  bool in_backward_ = false;
  bool is_last_backward_ = true;
};

}  // namespace tessera
