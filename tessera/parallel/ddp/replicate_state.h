// What replicate attaches to a module: its buckets of gradients, the ends of the graph that fill them, and the hooks
// around forward.
//
// In forward, and again in backward for what is recomputed there, the modules' members show stand-ins of the parameters
// that end in this object's nodes: one for each bucket, or while the order of gradients is being learned, one for each
// parameter. Buckets are reduced in their order on every rank, whatever arrives first. On an accelerator the gradients
// of a node are kept until those of the next one are packed, or backward ends.
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
  // One node of the graph: some parameters of one bucket.
  struct Source {
    size_t bucket;
    std::vector<size_t> params;  // indices into params_
    std::optional<GraphEnd> end;
    int runs = 0;           // in this backward
    int learned_runs = -1;  // with static_graph; -1: not known yet
    bool done = false;
  };
  // Which sources the graph of one forward reaches, with find_unused_parameters. Lives as long as that graph.
  struct Reach {
    std::vector<bool> sources;
    uint64_t generation;    // of the buckets
    bool consumed = false;  // backward has been through
  };

  // A parameter in the dtype that forward computes in, as it was at that version.
  struct Cast {
    at::Tensor value;
    const void* data = nullptr;
    int64_t version = 0;
  };

  void before_forward(nn::TensorRefs& inputs);
  void after_forward(nn::TensorRefs& outputs);
  bool recomputing() const;
  at::Tensor computed_form(size_t param, bool keeps);

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
  bool learning_order_ = false;

  std::vector<ReplicatedParam> params_;  // in order of registration
  std::vector<size_t> trainable_;
  std::vector<at::Tensor> stand_ins_;  // of params_, of the last forward; empty when there is nothing to show
  std::vector<Cast> casts_;            // of params_, for all forwards until the gradients of a step are complete
  std::vector<at::Tensor> packing_;    // gradients that a stream still reads, until `packed_`
  StreamMark packed_;
  std::vector<GradBucket> buckets_;
  std::vector<Source> sources_;
  std::vector<std::weak_ptr<Reach>> reaches_;
  std::vector<std::pair<size_t, size_t>> places_;  // of params_: bucket and position in it
  uint64_t params_generation_ = 0, buckets_generation_ = 0;
  std::vector<int> missing_;     // sources that each bucket waits for
  std::vector<size_t> arrival_;  // of trainable parameters, while learning
  size_t next_bucket_ = 0;       // to be reduced
  bool in_backward_ = false;
};

// Null when replicate was not called on this module.
ReplicateState* replicate_state(const nn::Module& module);

}  // namespace tessera
