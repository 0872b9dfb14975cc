// The state that replicate attaches to a module: its gradient buckets, the autograd nodes (GradAccumulatorNode) that
// fill them, and the hooks around forward.
//
// During forward, and during recomputation in backward, the modules' members hold forward parameters: tensors over the
// parameters' memory (or casts of the parameters), whose autograd graph ends in the nodes of this object. There is one
// node per bucket, or one per parameter until the buckets have been rebuilt. Buckets are reduced in the same order on
// every rank, independent of the order in which gradients arrive. On an accelerator the gradients of a node are kept
// alive until the gradients of the next node are packed, or backward ends.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "tessera/parallel/data_parallel/data_parallel_state.h"
#include "tessera/parallel/data_parallel/gradient_nodes.h"
#include "tessera/parallel/ddp/grad_bucket.h"
#include "tessera/parallel/ddp/replicate.h"

namespace tessera {

class ReplicateState : public DataParallelState, public std::enable_shared_from_this<ReplicateState> {
 public:
  ReplicateState(nn::Module& module, ReplicateOptions options);
  void install_hooks();

  bool synchronizes() const override { return synchronize_; }
  void set_synchronize(bool on) override { synchronize_ = on; }
  void set_gradient_divisor(double factor) override { divide_ = factor; }
  ReplicateStats& stats() { return stats_; }

 private:
  // One GradAccumulatorNode. It receives the gradients of some or all parameters of one bucket.
  struct BucketNode {
    size_t bucket;
    std::vector<size_t> params;  // indices in params_
    std::optional<GradAccumulatorNode> end;
    int runs = 0;           // runs of the node in this backward
    int learned_runs = -1;  // runs per backward, with static_graph; -1: unknown
    bool done = false;      // no more gradients are expected in this backward
  };
  // Which of nodes_ the autograd graph of one forward reaches, for find_unused_parameters. The hooks on that graph own
  // the ReachableNodes object; reachable_nodes_ has only weak pointers.
  struct ReachableNodes {
    std::vector<bool> reached_nodes;
    uint64_t generation;    // buckets_generation_ at that forward
    bool consumed = false;  // backward has run through the graph
  };

  // A cast of a parameter to the compute dtype, with the data pointer and version counter that the parameter had then.
  struct CastParameter {
    at::Tensor value;
    const void* data = nullptr;
    int64_t version = 0;
  };

  void before_forward(nn::TensorRefs& inputs);
  void after_forward(nn::TensorRefs& outputs);
  bool recomputing() const;
  at::Tensor forward_param(size_t param, bool keeps);

  // Initialises the state in the first forward, and again after parameters were replaced, frozen or unfrozen.
  // COLLECTIVE over the mesh.
  void lazy_init();
  bool parameters_unchanged();
  void collect_parameters();
  void check_equal_on_ranks();
  void copy_from_first_rank(bool parameters);
  void make_buckets(const std::vector<size_t>& order, bool one_node_each);
  void rebuild_buckets();
  void use_forward_params();
  void use_parameters();

  std::shared_ptr<ReachableNodes> find_reachable_nodes(const std::vector<at::Tensor>& roots);
  std::vector<bool> unused_nodes() const;
  void enter_backward();
  void receive_gradients(size_t index, std::vector<at::Tensor>&& gradients);
  void pack_gradients(const std::vector<size_t>& params, std::vector<at::Tensor>&& gradients);
  void free_packed_gradients();
  void finish_node(BucketNode& node);
  void start_buckets(bool all);
  void end_backward();
  void reset_node_counts();
  void reset();

  comm::Group& group() const { return *options_.mesh->group(0); }

  nn::Module& module_;
  ReplicateOptions options_;
  std::shared_ptr<BufferPool> pool_ = std::make_shared<BufferPool>();
  std::shared_ptr<CommStreams> streams_;
  ReplicateStats stats_;
  bool synchronize_ = true;
  double divide_;
  bool initialized_ = false;
  bool will_rebuild_buckets_ = false;  // the next synchronised backward rebuilds the buckets

  std::vector<ReplicatedParam> params_;     // in order of registration
  std::vector<size_t> trainable_;           // indices of the parameters that require gradients
  std::vector<at::Tensor> forward_params_;  // for params_, of the last forward; empty: members hold the parameters
  std::vector<CastParameter> casts_;  // for params_, shared by all forwards until the step's gradients are complete
  std::vector<at::Tensor> packed_gradients_;  // gradients that a stream reads until packed_
  DeviceEvent packed_;
  std::vector<GradBucket> buckets_;
  std::vector<BucketNode> nodes_;
  std::vector<std::weak_ptr<ReachableNodes>> reachable_nodes_;
  std::vector<std::pair<size_t, size_t>> bucket_positions_;  // for params_: bucket and position in it
  uint64_t params_generation_ = 0, buckets_generation_ = 0;  // grow when params_ and buckets_ are rebuilt
  std::vector<int> outstanding_nodes_;                       // for each bucket: nodes that have not run
  std::vector<size_t> gradient_order_;  // trainable parameters in the order of their gradients, while learning
  size_t next_bucket_ = 0;              // next bucket to be reduced
  bool in_backward_ = false;
};

// Null when replicate was not called on this module.
ReplicateState* replicate_state(const nn::Module& module);

}  // namespace tessera
