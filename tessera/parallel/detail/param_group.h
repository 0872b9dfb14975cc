// The parameters of one fully_shard call: one all-gather, one reduce-scatter, and the state between them.
//
// Sharded, they are DTensors in one flat buffer (Shards). Unsharded, they are views of one storage whose memory comes
// and goes (WholeStorage). How one becomes the other is the group's GatherPlan. Belongs to one rank.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/parallel/detail/buffer_pool.h"
#include "tessera/parallel/detail/gather_plan.h"
#include "tessera/parallel/detail/grad_reducer.h"
#include "tessera/parallel/detail/shards.h"
#include "tessera/parallel/detail/whole_storage.h"
#include "tessera/parallel/fully_shard.h"

namespace tessera::parallel {

class ParamGroup {
 public:
  // Shards `params` (name, slots, shape, dtype and parameter are set; parameter is the whole tensor, meta included,
  // or a DTensor of tensor parallelism)
  // and shows the shards in the modules. COLLECTIVE over the shard dim of the mesh where its group is not made yet.
  ParamGroup(std::vector<ShardedParam> params, MeshPtr mesh, const MixedPrecisionPolicy& policy);

  // COLLECTIVE over the shard dim of the mesh. start returns at once; finish waits and lays the parameters out.
  // start gathers anew when this rank's shards have changed since.
  void start_unshard();
  void finish_unshard();
  void reshard();
  bool gathering() const { return state_ == State::kGathering; }  // started, not finished
  // Gathered, as a copy of the shards; changed: those of this rank have been written or replaced since.
  bool may_be_stale() const { return state_ == State::kUnsharded && plan_.way != GatherWay::kAlias; }
  bool changed() const { return shards_.replaced() || shards_.version() != gathered_version_; }

  // What the modules' forward reads: handles from whole_tensors(), or the DTensors.
  void show_whole(const std::vector<at::Tensor>& tensors);
  void show_shards();
  // Fresh handles of the unsharded parameters, in order of params().
  std::vector<at::Tensor> whole_tensors() const;

  std::vector<ShardedParam>& params() { return shards_.params(); }
  Shards& shards() { return shards_; }
  const MeshPtr& mesh() const { return shards_.mesh(); }
  GradReducer& reducer() { return reducer_; }
  const std::string& name() const { return name_; }
  void set_name(std::string name) { name_ = std::move(name); }
  // The tensors that were sharded, to recognise other slots that are tied to them.
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  const std::vector<WeakTensor>& originals() const { return originals_; }

  bool synchronize = true;  // reduce at the end of its backward; else accumulate
  double divide;            // the sum of gradients over ranks; default: their number

  // Where buffers come from and what is counted; shared by the groups below one root.
  void join(std::shared_ptr<BufferPool> pool, FsdpStats* stats);

 private:
  enum class State { kSharded, kGathering, kUnsharded };
  void fill_whole();
  void count(int64_t groups);

  std::string name_;
  std::vector<WeakTensor> originals_;
  GatherPlan plan_;
  Shards shards_;
  WholeStorage whole_;
  State state_ = State::kSharded;
  bool shows_whole_ = false;
  uint64_t gathered_version_ = 0;  // of the shards, when they were gathered
  at::Tensor gathered_;
  at::Tensor input_;
  comm::Pending pending_;
  std::shared_ptr<BufferPool> pool_;
  FsdpStats* stats_ = nullptr;
  GradReducer reducer_;
};

}  // namespace tessera::parallel
