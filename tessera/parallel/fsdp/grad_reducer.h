// The gradients of one group on their way to the shards: accumulated whole over micro-batches without synchronisation,
// reduce-scattered (and over replicas all-reduced), then handed to the sharded parameters' grad().
//
//   reducer.accumulate(params, trainable, gradients);   // local
//   reducer.start();                                    // COLLECTIVE over the mesh; returns at once
//   ...
//   reducer.finish();                                   // waits; gradients are DTensors of the parameters
//
// On an accelerator the stages (ReductionStages) run beside what computes, over a second group of the ranks that
// gather; what computes comes behind each reduce-scatter before the next one starts, so that two of them, and no more,
// have buffers at a time.
//
// A parameter that no rank had a gradient for keeps its grad() as it was. Belongs to one rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/parallel/data_parallel/comm_streams.h"
#include "tessera/parallel/data_parallel/flat_gradients.h"
#include "tessera/parallel/data_parallel/reduction_stages.h"
#include "tessera/parallel/fsdp/fully_shard.h"
#include "tessera/parallel/fsdp/sharded_param.h"

namespace tessera {

class GradReducer {
 public:
  // mesh: 1-d (shard) or 2-d (replicate, shard).
  // to_host: gradients end in memory of the host.
  GradReducer(MeshPtr mesh, std::shared_ptr<BufferPool> pool, std::optional<c10::ScalarType> reduce_dtype,
              bool to_host = false);

  // gradients[i] belongs to params[trainable[i]] and may be undefined. COLLECTIVE over the tensor-parallel mesh of
  // those that lie in another way than their parameter.
  void accumulate(std::vector<ShardedParam>& params, const std::vector<size_t>& trainable,
                  std::vector<at::Tensor>&& gradients, const std::string& subject);
  // Returns whether there was anything to reduce. divide: what the sum over ranks is divided by.
  bool start(double divide, const std::string& subject);
  // COLLECTIVE over the replicate dim. Waits for the running stage and starts the next one; false when there was none
  // left and the gradients are in place. A copy to the host is waited for `at_end` alone.
  bool advance(const std::string& subject, bool at_end);
  void finish(const std::string& subject);  // all stages
  bool in_flight() const { return stages_.in_flight(); }
  // Called with the parameters that have been handed gradients.
  void set_hook(GradientsHook hook) { hook_ = std::move(hook); }
  int64_t accumulated_bytes() const { return flat_.bytes(); }
  void drop();  // after an error: waits for what is in flight and forgets it
  // Shared by the groups below one root. COLLECTIVE over the shard dim where its second group is not made yet.
  void join(std::shared_ptr<BufferPool> pool, std::shared_ptr<CommStreams> streams);

 private:
  void begin(std::vector<ShardedParam>& params, const std::vector<size_t>& trainable, c10::ScalarType dtype);
  void bring_to_parameters(const std::vector<ShardedParam>& params, const std::vector<size_t>& trainable,
                           std::vector<at::Tensor>& gradients, const std::string& subject) const;
  void set_gradients(const at::Tensor& sum);

  MeshPtr mesh_;
  std::shared_ptr<BufferPool> pool_;
  std::optional<c10::ScalarType> reduce_dtype_;
  const bool to_host_;
  int64_t shard_dim_;
  std::shared_ptr<comm::Group> reduces_;  // along it
  FlatGradients flat_;
  ReductionStages stages_;
  std::vector<ShardedParam>* params_ = nullptr;
  std::vector<size_t> trainable_;
  GradientsHook hook_;
};

}  // namespace tessera
