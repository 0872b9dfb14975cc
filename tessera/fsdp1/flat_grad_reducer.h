// Reduces the gradients of one flat parameter. The gradients of its members (the original parameters) accumulate in one
// buffer for the whole flat parameter. The buffer is then reduce-scattered into shards, or all-reduced where every rank
// holds the whole flat parameter.
//
//   reducer.add(0, gradient);                  // local; any number of backward passes
//   reducer.start(divide, "layers.0");         // COLLECTIVE over the group; returns at once
//   while (reducer.advance("layers.0")) {}     // COLLECTIVE over the replicas, if there are any
//   auto sum = reducer.finish(trainable);      // this rank's shard of the gradient
//
// On an accelerator the stages (ReductionStages) run concurrently with the computation, and reduce-scatters use a
// second group of the same ranks. With `flags` every rank also learns for each member whether any rank had a gradient.
// A FlatGradReducer is used by one rank only.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "tessera/fsdp1/flat_parameter_layout.h"
#include "tessera/parallel/data_parallel/buffer_pool.h"
#include "tessera/parallel/data_parallel/comm_streams.h"
#include "tessera/parallel/data_parallel/reduction_stages.h"

namespace tessera {

class FlatGradReducer {
 public:
  struct Options {
    bool sharded = true;  // false: every rank gets the whole sum
    bool flags = false;
    // Dtype of accumulation and reduction; Undefined: the layout's dtype.
    c10::ScalarType dtype = c10::ScalarType::Undefined;
    // The ranks with the same shard in other sharding groups, whose gradients are added (HYBRID_SHARD); null when there
    // are no replicas.
    std::shared_ptr<comm::Group> replicas = {};
  };
  // Keeps a reference to `layout`, which must outlive the reducer.
  FlatGradReducer(const FlatParameterLayout& layout, std::shared_ptr<comm::Group> group, c10::Device device,
                  Options options);
  // Sets the buffer pool and the CommStreams, which all units below one root module share. With sharding, the
  // reductions use CommStreams::second_group() of the reducer's group. join() is COLLECTIVE over the group if that call
  // makes the second group, which happens only on an accelerator.
  void join(std::shared_ptr<BufferPool> pool, std::shared_ptr<CommStreams> streams);

  // Allocates the gradient buffer, filled with zeros, unless it exists.
  void allocate_buffer();
  // Adds `gradient` to the gradient of the original parameter number `member` in the gradient buffer. `gradient` has
  // the shape of this parameter and any strides.
  void add(size_t member, const at::Tensor& gradient);
  bool has_buffer() const { return buffer_.defined(); }  // whether there is a gradient buffer
  // Starts the reduction. The sum over the ranks is divided by `divide`.
  void start(double divide, const std::string& subject);
  bool in_flight() const { return stages_.in_flight(); }
  // Waits for the running stage of the reduction and starts the next stage. Returns false when the last stage has
  // ended. COLLECTIVE over the replicas.
  bool advance(const std::string& subject) { return stages_.advance(subject, /*at_end=*/true); }

  struct ReducedGradient {
    at::Tensor values;               // gradient of the shard, or of the whole flat parameter
    std::vector<bool> has_gradient;  // for each member, whether any rank had a gradient; all true without flags
  };
  // Returns the reduced gradient. The host waits for the reduced flags when this rank had no gradient for a member in
  // `requested_members`.
  ReducedGradient finish(const std::vector<size_t>& requested_members);
  void discard();  // after an error: waits for the reduction in flight and discards it
  int64_t bytes() const { return has_buffer() ? static_cast<int64_t>(buffer_.nbytes()) : 0; }

 private:
  // `numel` elements of a flattened member, from element `start` on. They are stored at `offset` in part `part` of the
  // buffer.
  struct BufferRange {
    int64_t part, offset, start, numel;
  };

  const FlatParameterLayout& layout_;
  std::shared_ptr<comm::Group> group_, reduces_;
  c10::Device device_;
  Options options_;
  std::shared_ptr<BufferPool> pool_ = std::make_shared<BufferPool>();
  std::vector<std::vector<BufferRange>> ranges_;  // for each member
  int64_t parts_count_;
  int64_t values_numel_;  // elements of a part; the flags follow them
  std::vector<bool> filled_;
  at::Tensor buffer_;  // parts_count_ parts in one 1-d tensor; each part has values, then flags
  double post_scale_ = 1;
  ReductionStages stages_;
};

}  // namespace tessera
