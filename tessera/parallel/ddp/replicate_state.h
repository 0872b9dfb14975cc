// The state that replicate attaches to a module: its gradient buckets, the autograd end nodes that fill them, and the
// hooks around forward.
//
// During forward, and during recomputation in backward, the modules' members hold stand-ins: tensors over the
// parameters' memory (or casts of it) whose graph ends in the nodes of this object. There is one node per bucket, or
// one node per parameter while the order of gradients is learned. Buckets are reduced in the same order on every rank,
// independent of the order in which gradients arrive. On an accelerator the gradients of a node are kept alive until
// the gradients of the next node are packed, or backward ends.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "tessera/parallel/data_parallel/data_parallel_state.h"
#include "tessera/parallel/data_parallel/group_node.h"
#include "tessera/parallel/ddp/grad_bucket.h"
#include "tessera/parallel/ddp/replicate.h"

namespace tessera {

class ReplicateState : public DataParallelState, public std::enable_shared_from_this<ReplicateState> {
 public:
  ReplicateState(nn::Module& module, ReplicateOptions options);
  void install_hooks();

  bool synchronizes() const override { return synchronize_; }
  void set_synchronize(bool on) override { synchronize_ = on; }
  void set_divide(double factor) override { divide_ = factor; }
  ReplicateStats& stats() { return stats_; }

 private:
  // One autograd end node: some parameters of one bucket.
  struct Source {
    size_t bucket;
    std::vector<size_t> params;  // indices in params_
    std::optional<GraphEnd> end;
    int runs = 0;           // runs of the node in this backward
    int learned_runs = -1;  // runs per backward, with static_graph; -1: unknown
    bool done = false;      // no more gradients are expected in this backward
  };
  // The nodes that the graph of one forward reaches, for find_unused_parameters. The hooks of that graph own it.
  struct Reach {
    std::vector<bool> sources;
    uint64_t generation;    // buckets_generation_ at that forward
    bool consumed = false;  // backward has run through the graph
  };

  // A cast of a parameter to the compute dtype, with the data pointer and version of the parameter at the cast.
  struct Cast {
    at::Tensor value;
    const void* data = nullptr;
    int64_t version = 0;
  };

  void before_forward(nn::TensorRefs& inputs);
  void after_forward(nn::TensorRefs& outputs);
  bool recomputing() const;
  at::Tensor computed_form(size_t param, bool keeps);

  // Lazy initialisation, repeated when parameters were replaced, frozen or unfrozen. COLLECTIVE over the mesh.
  void settle();
  bool parameters_are_the_same();
  void collect_parameters();
  void check_alike();
  void copy_from_first_rank(bool parameters);
  void make_buckets(const std::vector<size_t>& order, bool one_source_each);
  void learn_order();
  void show_stand_ins();
  void show_parameters();

  std::shared_ptr<Reach> reach_of(const std::vector<at::Tensor>& roots);
  std::vector<bool> unused_sources() const;
  void enter_backward();
  void take(size_t source, std::vector<at::Tensor>&& gradients);
  void pack(const std::vector<size_t>& params, std::vector<at::Tensor>&& gradients);
  void release_packed();
  void finish_source(Source& source);
  void start_ready(bool all);
  void end_backward();
  void await_all_sources();
  void reset();

  comm::Group& group() const { return *options_.mesh->group(0); }

  nn::Module& module_;
  ReplicateOptions options_;
  std::shared_ptr<BufferPool> pool_ = std::make_shared<BufferPool>();
  std::shared_ptr<CommStreams> streams_;
  ReplicateStats stats_;
  bool synchronize_ = true;
  double divide_;
  bool settled_ = false;
  bool learning_order_ = false;  // the next synchronised backward decides the buckets

  std::vector<ReplicatedParam> params_;  // in order of registration
  std::vector<size_t> trainable_;        // indices of the parameters that require gradients
  std::vector<at::Tensor> stand_ins_;    // for params_, of the last forward; empty: members hold the parameters
  std::vector<Cast> casts_;              // for params_, shared by all forwards until the step's gradients are complete
  std::vector<at::Tensor> packing_;      // gradients that a stream reads until packed_
  DeviceEvent packed_;
  std::vector<GradBucket> buckets_;
  std::vector<Source> sources_;
  std::vector<std::weak_ptr<Reach>> reaches_;
  std::vector<std::pair<size_t, size_t>> places_;            // for params_: bucket and position in it
  uint64_t params_generation_ = 0, buckets_generation_ = 0;  // grow when params_ and buckets_ are rebuilt
  std::vector<int> missing_;                                 // for each bucket: nodes that have not run
  std::vector<size_t> arrival_;  // trainable parameters in the order of their gradients, while learning
  size_t next_bucket_ = 0;       // next bucket to be reduced
  bool in_backward_ = false;
};

// Null when replicate was not called on this module.
ReplicateState* replicate_state(const nn::Module& module);

}  // namespace tessera
