// Parameters that are gathered, freed and reduced together: what a GatherSchedule and the hooks of a GatheredState
// move. ParamGroup is that of fully_shard, FlatGroup that of wrap_fsdp1. Belongs to one rank.
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

class GatheredGroup {
 public:
  GatheredGroup(std::string name, double divide) : divide(divide), name_(std::move(name)) {}
  virtual ~GatheredGroup() = default;
  GatheredGroup(const GatheredGroup&) = delete;
  GatheredGroup& operator=(const GatheredGroup&) = delete;

  // COLLECTIVE over ranks(). start returns at once; finish waits and lays the parameters out.
  // start gathers anew when this rank's shards have changed since.
  virtual void start_unshard() = 0;
  virtual void finish_unshard() = 0;
  virtual void reshard() = 0;
  bool gathering() const { return state_ == State::kGathering; }  // started, not finished
  // Gathered, as a copy of the shards; changed: those of this rank have been written or replaced since.
  virtual bool may_be_stale() const = 0;
  virtual bool changed() const = 0;
  virtual comm::Group& ranks() const = 0;  // that a gather is over
  virtual c10::Device device() const = 0;  // of the whole parameters
  // What the stream of gathers is given from now on comes behind all writes to the shards so far.
  virtual void note_order() {}

  // What the modules' forward reads: handles from whole_tensors(), or what stands for the shards.
  virtual void show_whole(const std::vector<at::Tensor>& tensors) = 0;
  virtual void show_shards() = 0;
  // Fresh handles of the unsharded parameters.
  virtual std::vector<at::Tensor> whole_tensors() const = 0;
  // Those that gradients are wanted of, as positions in whole_tensors(), and the leaves that get them.
  virtual std::vector<size_t> trainable() const = 0;
  virtual std::vector<at::Tensor> leaves(const std::vector<size_t>& trainable) const = 0;

  // gradients[i] belongs to the whole tensor trainable[i] and may be undefined.
  virtual void accumulate(const std::vector<size_t>& trainable, std::vector<at::Tensor>&& gradients) = 0;
  // COLLECTIVE over all ranks of the group. Returns whether there was anything to reduce; does not wait.
  virtual bool start_reduction() = 0;
  // Waits for the running stage and starts the next one; false when none was left and the leaves have their gradients.
  // For a stage that only the host can wait for, it does so `at_end` alone.
  virtual bool advance_reduction(bool at_end) = 0;
  virtual void drop_gradients() = 0;  // after an error
  virtual int64_t accumulated_bytes() const = 0;

  // COLLECTIVE over ranks(). Where buffers come from, on which streams they are filled, and what is counted; shared by
  // the groups below one root.
  void join(std::shared_ptr<BufferPool> pool, std::shared_ptr<CommStreams> streams, FsdpStats* stats) {
    pool_ = std::move(pool);
    streams_ = std::move(streams);
    stats_ = stats;
    on_joined();
  }

  const std::string& name() const { return name_; }
  void set_name(std::string name) { name_ = std::move(name); }

  bool synchronize = true;             // reduce at the end of its backward; else accumulate
  bool reshard_after_backward = true;  // else stay gathered for the next forward
  double divide;                       // the sum of gradients over ranks

 protected:
  enum class State { kSharded, kGathering, kUnsharded };

  virtual void on_joined() = 0;
  // Waits for a gather that is given up; its error, if any, for when everything is put away.
  static std::exception_ptr wait_for_failure(comm::Pending& gather) noexcept {
    try {
      gather.wait();
      return nullptr;
    } catch (...) {
      return std::current_exception();
    }
  }
  // Groups that are unsharded from now on, or no longer, each of `bytes` of whole parameters.
  void count(int64_t groups, int64_t bytes) {
    if (stats_ == nullptr) return;
    stats_->unsharded_groups += groups;
    stats_->unsharded_bytes += groups * bytes;
    stats_->peak_unsharded_groups = std::max(stats_->peak_unsharded_groups, stats_->unsharded_groups);
  }

  State state_ = State::kSharded;
  bool shows_whole_ = false;  // in the modules
  std::shared_ptr<BufferPool> pool_ = std::make_shared<BufferPool>();
  std::shared_ptr<CommStreams> streams_ = std::make_shared<CommStreams>();
  FsdpStats* stats_ = nullptr;

 private:
  std::string name_;
};

}  // namespace tessera
