// The styles of tensor parallelism, with the placements of their inputs and outputs. "local": the output is this rank's
// local tensor, a plain tensor.
//
//   style                parameters                           input        output
//   ColwiseParallel      Linear, Head: rows; Embedding: columns   Replicate   Shard(-1), local
//   RowwiseParallel      Linear: columns; Embedding: rows     Shard(-1); ids Replicate    Replicate, local
//   SequenceParallel     replicated                           Shard(1)     Shard(1)
//
// A plain input is assumed to have the placement input_layout; this is not checked. A DTensor input is redistributed to
// the placement that the style computes on. Every call of a module is COLLECTIVE over the mesh if its style
// communicates. Shards of uneven size are supported if the global size is known: a row-wise Linear takes the size from
// its weight, and hidden states with uneven sequence shards must be passed as a DTensor.
#pragma once

#include "tessera/parallel/tensor_parallel/style.h"

namespace tessera {

struct LayoutOptions {
  std::optional<Placement> input_layout = std::nullopt;   // none: as in the table
  std::optional<Placement> output_layout = std::nullopt;  // none: as in the table
  bool use_local_output = true;
};

// Column-wise style for a Linear (weight and bias), a Head or an Embedding; Error kConfig for another module. The loss
// of a Head that is called with labels is a plain scalar on every rank, whatever output_layout is.
class ColwiseParallel : public ParallelStyle {
 public:
  explicit ColwiseParallel(const LayoutOptions& options = {}) : options_(options) {}
  void apply(nn::Module& module, const StyleContext& context) const override;
  std::string describe() const override;
  const LayoutOptions& options() const { return options_; }

 private:
  LayoutOptions options_;
};

// Row-wise style for a Linear or an Embedding; Error kConfig for another module. The bias of a Linear is replicated and
// added once. For an Embedding each rank looks up the ids of its own rows, and the other ids contribute zero.
class RowwiseParallel : public ParallelStyle {
 public:
  explicit RowwiseParallel(const LayoutOptions& options = {}) : options_(options) {}
  void apply(nn::Module& module, const StyleContext& context) const override;
  std::string describe() const override;
  const LayoutOptions& options() const { return options_; }

 private:
  LayoutOptions options_;
};

struct SequenceParallelOptions {
  int64_t sequence_dim = 1;
  bool use_local_output = false;
};

// A norm or dropout over tokens that are sharded along the sequence. Its parameters are replicated and assumed to be
// equal on all ranks; their gradients are summed over the ranks.
class SequenceParallel : public ParallelStyle {
 public:
  explicit SequenceParallel(const SequenceParallelOptions& options = {}) : options_(options) {}
  void apply(nn::Module& module, const StyleContext& context) const override;
  std::string describe() const override;

 protected:
  SequenceParallelOptions options_;
  bool gathers_output_ = false;
};

// SequenceParallel whose output is all-gathered, once for all projections that read it. Semantics of NeMo AutoModel.
class SequenceParallelAllGatherActivation : public SequenceParallel {
 public:
  explicit SequenceParallelAllGatherActivation(const SequenceParallelOptions& options = {})
      : SequenceParallel(options) {
    gathers_output_ = true;
  }
};

// A rotary embedding that is called with (hidden states, positions). The hidden states are sharded along the sequence,
// the positions are replicated. Plain hidden states must have the same local shape on all ranks: a COLLECTIVE check
// raises Error kShape if shapes differ. Semantics of NeMo RL.
class RotaryEmbedParallel : public SequenceParallel {
 public:
  using SequenceParallel::SequenceParallel;
  void apply(nn::Module& module, const StyleContext& context) const override;
  std::string describe() const override;
};

// A norm over the elements of each head, between a column-wise projection and attention. Its input is [B, T, heads,
// head_dim], sharded over the heads. The weight is replicated, and its gradient is summed over the ranks. A plain input
// gives a plain output; a DTensor input must be Shard(2), else Error kShape. Semantics of NeMo's Qwen3QKNorm and of
// transformers' replicated_with_grad_allreduce.
class QKNormParallel : public ParallelStyle {
 public:
  void apply(nn::Module& module, const StyleContext& context) const override;
  std::string describe() const override { return "QKNormParallel"; }
};

// The key or value projection of attention with fewer key-value heads than ranks, where the number of ranks is a
// multiple of the heads. The weight is replicated. Each rank returns the one head that its query heads read. Error
// kConfig for a module that is not a Linear, and if kv_heads does not divide the weight's rows or the number of ranks.
class ReplicatedKeyValue : public ParallelStyle {
 public:
  explicit ReplicatedKeyValue(int64_t kv_heads) : kv_heads_(kv_heads) {}
  void apply(nn::Module& module, const StyleContext& context) const override;
  std::string describe() const override;

 private:
  int64_t kv_heads_;
};

using Layouts = std::vector<std::optional<Placement>>;  // one per tensor; nullopt: the tensor is left as it is

// Placements of the tensor arguments of a module, and the placements that its forward needs. A plain tensor is assumed
// to have its input_layouts entry, and every tensor is redistributed to its desired_input_layouts entry. Error kConfig
// in the constructor for lists of different lengths, Error kShape in a call with another number of tensors.
struct PrepareModuleInputOptions {
  Layouts input_layouts = {};
  Layouts desired_input_layouts = {};
  bool use_local_output = false;
  bool leave_others = false;  // tensors after the listed ones are allowed and left as they are
};
class PrepareModuleInput : public ParallelStyle {
 public:
  explicit PrepareModuleInput(PrepareModuleInputOptions options);
  void apply(nn::Module& module, const StyleContext& context) const override;
  std::string describe() const override;

 private:
  PrepareModuleInputOptions options_;
};

// Placements of the tensors among a module's outputs, and the placements that they are redistributed to. Semantics and
// errors as PrepareModuleInputOptions.
struct PrepareModuleOutputOptions {
  Layouts output_layouts = {};
  Layouts desired_output_layouts = {};
  bool use_local_output = true;
};
class PrepareModuleOutput : public ParallelStyle {
 public:
  explicit PrepareModuleOutput(PrepareModuleOutputOptions options);
  void apply(nn::Module& module, const StyleContext& context) const override;
  std::string describe() const override;

 private:
  PrepareModuleOutputOptions options_;
};

// Applies PrepareModuleInput and PrepareModuleOutput to one module.
class PrepareModuleInputOutput : public ParallelStyle {
 public:
  PrepareModuleInputOutput(PrepareModuleInputOptions input, PrepareModuleOutputOptions output);
  void apply(nn::Module& module, const StyleContext& context) const override;
  std::string describe() const override;

 private:
  PrepareModuleInput input_;
  PrepareModuleOutput output_;
};

// Asynchronous tensor parallelism for an attention or MLP module with sequence parallelism: its all-gathers and
// reduce-scatters run in chunks that overlap the matrix products. The children named in `gathered` are column-wise and
// read the module's one input, a DTensor Shard(1). The child named in `scattered` is row-wise and returns a DTensor
// Shard(1). This style replaces the styles of these children and the all-gather before them. Error kConfig for a child
// that is not a Linear, or that has an adapter or a packed weight.
struct OverlappedBlockOptions {
  std::vector<std::string> gathered = {};
  std::string scattered = {};
  int64_t chunks = 2;
};
class OverlappedBlock : public ParallelStyle {
 public:
  explicit OverlappedBlock(OverlappedBlockOptions options) : options_(std::move(options)) {}
  void apply(nn::Module& module, const StyleContext& context) const override;
  std::string describe() const override;

 private:
  OverlappedBlockOptions options_;
};

}  // namespace tessera
