// The gradients of one flat parameter on their way to the shards: those of its members accumulate in one whole flat
// buffer, which is then reduce-scattered, or all-reduced where every rank holds everything.
//
//   reducer.add(0, gradient);                  // local, over as many backwards as one likes
//   reducer.start(divide, "layers.0");         // COLLECTIVE over the group; returns at once
//   while (reducer.advance("layers.0")) {}     // COLLECTIVE between replicas, where there are some
//   auto sum = reducer.finish(trainable);      // this rank's shard of the gradient
//
// On an accelerator the stages (ReductionStages) run beside what computes, reduce-scatters over a second group of the
// ranks. With flags, every rank learns of each member whether any rank had a gradient for it. Belongs to one rank.
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

class FlatReducer {
 public:
  struct Options {
    bool sharded = true;  // false: every rank gets the whole sum
    bool flags = false;
    c10::ScalarType dtype = c10::ScalarType::Undefined;  // gradients add up and travel in it; Undefined: the layout's
    // Ranks with the same part of other shardings, which add theirs (HYBRID_SHARD); none: there are none.
    std::shared_ptr<comm::Group> replicas = {};
  };
  // `layout` outlives it.
  FlatReducer(const FlatParameterLayout& layout, std::shared_ptr<comm::Group> group, c10::Device device,
              Options options);
  // Shared by the units below one root. COLLECTIVE over the group where its second one is not made yet.
  void join(std::shared_ptr<BufferPool> pool, std::shared_ptr<CommStreams> streams);

  // Room for gradients, zeros so far, if there is none yet.
  void open();
  // A gradient of the member's shape, in whatever strides.
  void add(size_t member, const at::Tensor& gradient);
  bool is_open() const { return parts_.defined(); }  // something was added since start
  // divide: what the sum over ranks is divided by.
  void start(double divide, const std::string& subject);
  bool in_flight() const { return stages_.in_flight(); }
  // Waits for the running stage and starts the next one; false when none was left. COLLECTIVE over the replicas.
  bool advance(const std::string& subject) { return stages_.advance(subject, /*at_end=*/true); }

  struct Sum {
    at::Tensor values;      // of the shard, or the whole flat parameter
    std::vector<bool> has;  // of each member: whether any rank had a gradient; all of them without flags
  };
  // The host waits where this rank had no gradient for one of the members `asked` about.
  Sum finish(const std::vector<size_t>& asked);
  void drop();  // after an error: waits for what is in flight and forgets it
  int64_t bytes() const { return is_open() ? static_cast<int64_t>(parts_.nbytes()) : 0; }

 private:
  // Some elements of a member, from `start` of it on, in a part of the buffer.
  struct Piece {
    int64_t part, offset, start, numel;
  };

  const FlatParameterLayout& layout_;
  std::shared_ptr<comm::Group> group_, reduces_;
  c10::Device device_;
  Options options_;
  std::shared_ptr<BufferPool> pool_ = std::make_shared<BufferPool>();
  std::vector<std::vector<Piece>> pieces_;  // of each member
  int64_t parts_count_;
  int64_t values_numel_;  // of a part; flags lie behind
  std::vector<bool> filled_;
  at::Tensor parts_;  // [parts, values and flags], flat
  double post_scale_ = 1;
  ReductionStages stages_;
};

}  // namespace tessera
