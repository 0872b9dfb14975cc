// A parameter group: parameters that are gathered, freed and reduced together. FsdpCommSchedule and the hooks of
// ShardingState drive it. Subclasses: FsdpParamGroup for fully_shard, FlatParamGroup for wrap_fsdp1. Belongs to one
// rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/collectives/collective_start.h"
#include "tessera/comm/group/group.h"
#include "tessera/parallel/data_parallel/buffer_pool.h"
#include "tessera/parallel/data_parallel/comm_streams.h"
#include "tessera/parallel/fsdp/fully_shard.h"

namespace tessera {

class ShardedParamGroup {
 public:
  ShardedParamGroup(std::string name, double divide) : divide(divide), name_(std::move(name)) {}
  virtual ~ShardedParamGroup() = default;
  ShardedParamGroup(const ShardedParamGroup&) = delete;
  ShardedParamGroup& operator=(const ShardedParamGroup&) = delete;

  // start_unshard() starts the all-gather and returns at once; finish_unshard() waits for it and makes the unsharded
  // parameters. start_unshard() does nothing if the group is unsharded, unless this rank's shards have changed since
  // the last gather. COLLECTIVE over ranks().
  virtual void start_unshard() = 0;
  virtual void finish_unshard() = 0;
  virtual void reshard() = 0;
  bool is_gathering() const { return state_ == State::kGathering; }  // started and not finished
  // may_be_stale(): whether the group is unsharded and its parameters are a copy of the shards, so that writes to the
  // shards do not reach them. changed(): whether this rank's shards were written or replaced since the last gather.
  virtual bool may_be_stale() const = 0;
  virtual bool changed() const = 0;
  virtual comm::Group& ranks() const = 0;  // the process group of the gather
  virtual c10::Device device() const = 0;  // of the unsharded parameters
  // Records that the gather stream already waits for all writes to the shards so far.
  virtual void mark_shards_ordered() {}

  // use_unsharded_params() sets the modules' members to `tensors`, which unsharded_tensors() returned.
  // use_sharded_params() sets the members to the tensors that users see outside forward: the shards, or, for FSDP1
  // without use_orig_params, views of the flat parameter's freed storage.
  virtual void use_unsharded_params(const std::vector<at::Tensor>& tensors) = 0;
  virtual void use_sharded_params() = 0;
  // Returns new tensors over the memory of the unsharded parameters.
  virtual std::vector<at::Tensor> unsharded_tensors() const = 0;
  // trainable() returns the parameters that require gradients, as positions in unsharded_tensors(). leaves() returns
  // the autograd leaf tensors that receive the gradients of the parameters `trainable`.
  virtual std::vector<size_t> trainable() const = 0;
  virtual std::vector<at::Tensor> leaves(const std::vector<size_t>& trainable) const = 0;

  // Adds gradients to the group's buffer of unsharded gradients. gradients[i] is the gradient of
  // unsharded_tensors()[trainable[i]] and may be undefined.
  virtual void accumulate(const std::vector<size_t>& trainable, std::vector<at::Tensor>&& gradients) = 0;
  // Starts the reduction and returns at once. Returns false if there are no gradients to reduce. COLLECTIVE over all
  // ranks of the mesh.
  virtual bool start_reduction() = 0;
  // Waits for the running stage of the reduction and starts the next stage. Returns false if no stage is left; grad()
  // of the leaves is then written. The last stage may be a copy of the gradients to host memory (offloading). The call
  // waits for this copy only if `at_end` is true; otherwise it returns true while the copy is the running stage.
  virtual bool advance_reduction(bool at_end) = 0;
  virtual void drop_gradients() = 0;  // after an error
  virtual int64_t accumulated_bytes() const = 0;

  // Adds this group to the groups of one root module, which share a buffer pool, streams and statistics. COLLECTIVE
  // over ranks().
  void join(std::shared_ptr<BufferPool> pool, std::shared_ptr<CommStreams> streams, FsdpStats* stats) {
    pool_ = std::move(pool);
    streams_ = std::move(streams);
    stats_ = stats;
    on_joined();
  }

  const std::string& name() const { return name_; }
  void set_name(std::string name) { name_ = std::move(name); }

  bool synchronize = true;             // reduce gradients at the end of its backward; false: accumulate
  bool reshard_after_backward = true;  // false: stay gathered for the next forward
  double divide;                       // divisor of the gradient sums

 protected:
  enum class State { kSharded, kGathering, kUnsharded };

  virtual void on_joined() = 0;
  // Waits for a gather whose result is not used. Returns its error, if any, so that the caller can throw it after the
  // cleanup.
  static std::exception_ptr wait_for_failure(comm::PendingCollective& gather) noexcept {
    try {
      gather.wait();
      return nullptr;
    } catch (...) {
      return std::current_exception();
    }
  }
  // Updates stats_ when `groups` more groups (or, if negative, fewer) of `bytes` bytes each are unsharded.
  void count(int64_t groups, int64_t bytes) {
    if (stats_ == nullptr) return;
    stats_->unsharded_groups += groups;
    stats_->unsharded_bytes += groups * bytes;
    stats_->peak_unsharded_groups = std::max(stats_->peak_unsharded_groups, stats_->unsharded_groups);
  }

  State state_ = State::kSharded;
  bool uses_unsharded_params_ = false;  // the modules' members hold unsharded parameters
  std::shared_ptr<BufferPool> pool_ = std::make_shared<BufferPool>();
  std::shared_ptr<CommStreams> streams_ = std::make_shared<CommStreams>();
  FsdpStats* stats_ = nullptr;

 private:
  std::string name_;
};

}  // namespace tessera
