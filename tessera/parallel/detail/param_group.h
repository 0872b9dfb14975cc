// The parameters of one fully_shard call: one flat buffer, one all-gather, one reduce-scatter.
//
// Sharded, they are DTensors whose local parts lie in one flat buffer, so that the all-gather reads it as it is.
// Unsharded, they are views of one storage that keeps its identity while its memory comes and goes: autograd saves
// views of it in forward, the memory is freed, and refilled before backward reads them.
// Belongs to one rank.
#pragma once

#include <c10/core/Storage.h>

#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/parallel/detail/buffer_pool.h"
#include "tessera/parallel/detail/flat_layout.h"
#include "tessera/parallel/detail/grad_reducer.h"
#include "tessera/parallel/detail/sharded_param.h"
#include "tessera/parallel/fully_shard.h"

namespace tessera::parallel {

class ParamGroup {
 public:
  // Shards `params` (name, slots, shape, dtype and parameter are set; parameter is the whole tensor, meta included)
  // and shows the shards in the modules. COLLECTIVE over the shard dim of the mesh where its group is not made yet.
  ParamGroup(std::vector<ShardedParam> params, MeshPtr mesh, const MixedPrecisionPolicy& policy);

  // COLLECTIVE over the shard dim of the mesh. start returns at once; finish waits and lays the parameters out.
  // start gathers anew when shards have changed since.
  void start_unshard();
  void finish_unshard();
  void reshard();
  bool sharded() const { return state_ == State::kSharded; }
  bool gathering() const { return state_ == State::kGathering; }  // started, not finished

  // What the modules' forward reads: handles from whole_tensors(), or the DTensors.
  void show_whole(const std::vector<at::Tensor>& tensors);
  void show_shards();
  // Fresh handles of the unsharded parameters, in order of params().
  std::vector<at::Tensor> whole_tensors() const;
  std::vector<size_t> trainable() const;

  // Gives shards on the meta device uninitialised memory; their parameters() are new tensors.
  void materialize();
  bool on_meta() const;
  // Takes over parameters that somebody replaced (a load with assignment). Error kShape when one does not fit.
  void check_slots();

  std::vector<ShardedParam>& params() { return params_; }
  const MeshPtr& mesh() const { return mesh_; }
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
  void create_shards(c10::Device device, bool copy_values);
  c10::Allocator* sent_memory() const;  // for what is gathered
  // One rank that gathers as stored: forward reads the shards themselves.
  bool aliases_shards() const { return ranks_ == 1 && !casts_; }
  // The gathered buffer is laid out like the unsharded storage: nothing to unpack.
  bool gathers_in_place() const { return ranks_ == 1 || params_.size() == 1; }
  void lead_with_largest();
  void lay_out_whole();
  void unpack();
  bool flat_input() const { return uniform_ && !replaced_; }
  c10::ScalarType wire_dtype() const { return uniform_ ? params_[0].gather_dtype : c10::kByte; }
  void write_input(const at::Tensor& target) const;
  void fill_storage();
  void free_storage();
  void bind_whole();
  void count(int64_t groups);
  uint64_t version() const;

  std::string name_;
  std::vector<WeakTensor> originals_;
  std::vector<ShardedParam> params_;
  MeshPtr mesh_;
  int64_t ranks_;
  int64_t rank_;
  bool uniform_ = true;  // one stored dtype: shards are gathered from the flat buffer as it is
  bool casts_ = false;   // some parameter is gathered in another dtype than stored
  bool replaced_ = false;  // some shard no longer lies in flat_shard_
  // One parameter (an embedding) is nearly all of the group: it is gathered into the unsharded storage and put together
  // there, the others move behind it. Saves a buffer of the group's size.
  bool compacts_ = false;
  FlatLayout shard_layout_;   // stored dtypes
  FlatLayout gather_layout_;  // gathered dtypes; same offsets in elements when uniform
  std::vector<int64_t> whole_offsets_;  // bytes in the unsharded storage
  int64_t whole_bytes_ = 0;
  at::Tensor flat_shard_;  // bytes; this rank's part, stored dtypes
  c10::Storage whole_storage_;
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
