// Decides when the parameter groups of one root module are all-gathered and freed, and when their gradients are
// reduced.
//
// Forward: a group is gathered before its module's forward and freed after it. The gather of the group that followed it
// in the last forward starts at the same time (prefetch). Backward: a group is gathered when the gradient of its
// module's output is known, and the gather of the group before it in forward starts. When all gradients of the group
// are known, the group is freed, the reductions in flight advance by one stage (the compute stream waits for the
// reduce-scatter of the previous group), and then the reduction of this group starts. The end of backward waits for the
// last reductions. So at most two groups and the root are unsharded at a time. After an exception the next forward of
// the root resets all state. Belongs to one rank.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/parallel/fsdp/fully_shard.h"
#include "tessera/parallel/fsdp/sharded_param_group.h"

namespace tessera {

// The record of one forward of one sharded module, for its backward hooks.
struct ForwardRecord {
  size_t position = 0;         // in the post-forward order
  uint64_t epoch = 0;          // epoch_ at this forward; position is valid only in this epoch
  uint64_t seen_backward = 0;  // number of the last backward that has reached this forward
  bool recomputed = false;     // a forward that runs inside a backward (activation checkpointing)
};

class FsdpCommSchedule : public std::enable_shared_from_this<FsdpCommSchedule> {
 public:
  // `prefetch` must be equal on all ranks.
  explicit FsdpCommSchedule(bool prefetch) : prefetch_(prefetch) {}
  // Adds a group to the groups that this object schedules. COLLECTIVE over the group's ranks, because it calls
  // ShardedParamGroup::join().
  void add(const std::shared_ptr<ShardedParamGroup>& group);

  // Call before the root's forward. Reshards each group that has stayed gathered if any rank's shards of the group were
  // written or replaced since the gather, because the gathered parameters are then out of date. COLLECTIVE over the
  // shard dim of each group that has stayed gathered; these are the same groups on all ranks.
  void begin_forward();
  void end_forward();  // call after the root's forward; frees prefetched groups that were not used
  void before_forward(ShardedParamGroup& group);
  // Call after the group's forward. Adds the group to the order that backward will reverse. `group` is null for a
  // module without its own parameters.
  ForwardRecord after_forward(ShardedParamGroup* group);
  void before_backward(ShardedParamGroup* group, ForwardRecord& record);
  void after_backward(ShardedParamGroup& group);
  bool recomputing() const;  // whether a forward runs inside a backward
  // Reduces the gradients that backwards without synchronisation have accumulated, for all groups whose `synchronize`
  // is true now, and waits. COLLECTIVE over all ranks of the groups' meshes.
  void reduce_accumulated();

  void set_prefetch(bool on) { prefetch_ = on; }
  // After set_is_last_backward(false) a backward starts its reductions but does not wait for them at its end. After
  // set_is_last_backward(true) the next backward waits for all reductions.
  void set_is_last_backward(bool on) { is_last_backward_ = on; }
  FsdpStats& stats() { return stats_; }

 private:
  void enter_backward();
  void end_backward();
  void reset();
  void start_reduction(ShardedParamGroup& group);
  void finish_reductions();
  void reshard_stale_groups();
  ShardedParamGroup* next_in_backward(const ShardedParamGroup& group, const ForwardRecord& record);

  bool prefetch_;
  std::shared_ptr<BufferPool> pool_ = std::make_shared<BufferPool>();
  std::shared_ptr<CommStreams> streams_;  // of the device of the first group
  FsdpStats stats_;
  std::vector<std::shared_ptr<ShardedParamGroup>> groups_;
  std::vector<ShardedParamGroup*> forward_order_;       // of the last forward
  std::vector<ShardedParamGroup*> next_forward_order_;  // of this forward, so far
  std::vector<ShardedParamGroup*> post_forward_order_;  // by end of forward, of all forwards in this epoch
  size_t recompute_position_ = 0;                       // groups from this position of forward_order_ on are recomputed
  std::vector<ShardedParamGroup*> reducing_;            // in flight, oldest first
  uint64_t epoch_ = 1;                                  // grows when post_forward_order_ is cleared
  uint64_t backward_ = 0;                               // number of the current backward
  bool in_forward_ = false;
  bool in_backward_ = false;
  bool is_last_backward_ = true;
};

}  // namespace tessera
