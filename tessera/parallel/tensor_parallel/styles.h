// The styles of tensor parallelism. What they ask and give is in the table; "local" outputs are this rank's part.
//
//   style                parameters                           input        output
//   ColwiseParallel      Linear, Head: rows; Embedding: columns   Replicate   Shard(-1), local
//   RowwiseParallel      Linear: columns; Embedding: rows     Shard(-1); ids Replicate    Replicate, local
//   SequenceParallel     replicated                           Shard(1)     Shard(1)
//
// A plain input is taken to lie as input_layout says, unchecked; a DTensor is brought to what the style computes on.
// All calls of a module are COLLECTIVE over the mesh where its style communicates. Uneven sizes are right as long as
// the global size can be known: that of a row-wise input comes from the weight, sequences of uneven parts must arrive
// as DTensors.
#pragma once

#include "tessera/parallel/tensor_parallel/style.h"

namespace tessera {

struct LayoutOptions {
  std::optional<Placement> input_layout = std::nullopt;   // none: as in the table
  std::optional<Placement> output_layout = std::nullopt;  // none: as in the table
  bool use_local_output = true;
};

// Of a Linear (weight and bias), a Head or an Embedding; Error kConfig for another module. The loss of a head that was
// called with labels is this rank's plain scalar whatever output_layout says.
class ColwiseParallel : public ParallelStyle {
 public:
  explicit ColwiseParallel(const LayoutOptions& options = {}) : options_(options) {}
  void apply(nn::Module& module, const StyleContext& context) const override;
  std::string describe() const override;
  const LayoutOptions& options() const { return options_; }

 private:
  LayoutOptions options_;
};

// Of a Linear (its bias is replicated, and added once) or an Embedding, where each rank looks up the ids of its rows
// and the others count as zero; Error kConfig for another module.
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

// A norm or dropout over tokens that are sharded along the sequence. Parameters are replicated, taken to be alike on
// all ranks; their gradients are summed over the ranks.
class SequenceParallel : public ParallelStyle {
 public:
  explicit SequenceParallel(const SequenceParallelOptions& options = {}) : options_(options) {}
  void apply(nn::Module& module, const StyleContext& context) const override;
  std::string describe() const override;

 protected:
  SequenceParallelOptions options_;
  bool gathers_output_ = false;
};

// SequenceParallel whose output is gathered, once for all products that read it. Semantics of NeMo AutoModel.
class SequenceParallelAllGatherActivation : public SequenceParallel {
 public:
  explicit SequenceParallelAllGatherActivation(const SequenceParallelOptions& options = {})
      : SequenceParallel(options) {
    gathers_output_ = true;
  }
};

// A rotary embedding that is called with (hidden states, positions): hidden states are sharded along the sequence, a
// plain part is checked to have the same shape on all ranks (COLLECTIVE), positions are replicated. Error kShape where
// shapes differ. Semantics of NeMo RL.
class RotaryEmbedParallel : public SequenceParallel {
 public:
  using SequenceParallel::SequenceParallel;
  void apply(nn::Module& module, const StyleContext& context) const override;
  std::string describe() const override;
};

// A norm over the elements of each head, between a column-wise projection and attention: [B, T, heads, head_dim], heads
// sharded. The weight is replicated, its gradient summed over the ranks. Plain inputs give plain outputs, DTensors must
// be Shard(2). NeMo's Qwen3QKNorm, and transformers' replicated_with_grad_allreduce.
class QKNormParallel : public ParallelStyle {
 public:
  void apply(nn::Module& module, const StyleContext& context) const override;
  std::string describe() const override { return "QKNormParallel"; }
};

// The projection to keys or values of attention that has fewer key-value heads than ranks, of which the number of ranks
// is a multiple: the weight is replicated, each rank gives the one head that its query heads read.
class ReplicatedKeyValue : public ParallelStyle {
 public:
  explicit ReplicatedKeyValue(int64_t kv_heads) : kv_heads_(kv_heads) {}
  void apply(nn::Module& module, const StyleContext& context) const override;
  std::string describe() const override;

 private:
  int64_t kv_heads_;
};

using Layouts = std::vector<std::optional<Placement>>;  // one a tensor, none: left alone

// How the tensors among a module's arguments lie, and how its forward wants them. Error kConfig here for lists of
// different length, Error kShape in a call with another number of tensors.
struct PrepareModuleInputOptions {
  Layouts input_layouts = {};
  Layouts desired_input_layouts = {};
  bool use_local_output = false;
  bool leave_others = false;  // tensors behind those that are named are left alone
};
class PrepareModuleInput : public ParallelStyle {
 public:
  explicit PrepareModuleInput(PrepareModuleInputOptions options);
  void apply(nn::Module& module, const StyleContext& context) const override;
  std::string describe() const override;

 private:
  PrepareModuleInputOptions options_;
};

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

class PrepareModuleInputOutput : public ParallelStyle {
 public:
  PrepareModuleInputOutput(PrepareModuleInputOptions input, PrepareModuleOutputOptions output);
  void apply(nn::Module& module, const StyleContext& context) const override;
  std::string describe() const override;

 private:
  PrepareModuleInput input_;
  PrepareModuleOutput output_;
};

// Attention or MLP of sequence parallelism whose gathers and scatters run in chunks beside the products (asynchronous
// tensor parallelism): the children named in `gathered` are sharded by columns and read the module's one input, a
// DTensor Shard(1), the one named in `scattered` by rows, and gives a DTensor Shard(1). Takes the place of their own
// styles and of the gather before them. Error kConfig for a child that is no Linear.
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
