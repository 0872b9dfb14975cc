// PyTorch's context_parallel: while a scope lives, plain attention runs over the ranks of a mesh.
//
//   {
//     ContextParallel scope(mesh, {.buffers = {tokens}, .buffer_seq_dims = {1}});     // [B, T] -> [B, T / ranks]
//     at::Tensor y = scaled_dot_product_attention(q, k, v, {.is_causal = true});      // over the ranks, as nn::attend
//     out = context_parallel_unshard(mesh, {y}, {2})[0];
//   }                                                                                 // tokens are whole again
//
// Semantics of torch.distributed.tensor.experimental.context_parallel. The sequence lies balanced (context_layout.h)
// where 2 * ranks divides its length, else each rank has one contiguous part; lengths that `ranks` does not divide are
// taken, too. Packed rows are for apply_context_parallel. Attention by a model or a pattern that was made inside goes
// back, and is run again where activations are checkpointed, behind the scope as inside; whoever calls
// scaled_dot_product_attention again has to do so inside. One rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string_view>
#include <vector>

#include "tessera/mesh/device_mesh.h"

namespace tessera {

namespace nn {
class ContextScope;
}

struct ContextParallelOptions {
  std::vector<at::Tensor> buffers{};             // plain; no parameters
  std::vector<int64_t> buffer_seq_dims{};        // the dim of the sequence of each
  std::vector<at::Tensor> no_restore_buffers{};  // of `buffers`: stay this rank's part, and their memory is free
};

class ContextParallel {
 public:
  // The very tensors of `buffers` show this rank's part from now on, which a graph that has saved one notices.
  // Everything is checked before any changes. COLLECTIVE over the mesh at its first use. Errors kShape: a mesh of
  // several dims, no buffers, numbers of buffers and dims that differ, sequences of several lengths, a buffer of
  // no_restore_buffers that is none of `buffers`, one that is a DTensor or needs a gradient.
  ContextParallel(const MeshPtr& mesh, const ContextParallelOptions& options);
  // Restores the buffers. On the thread that made it.
  ~ContextParallel();
  ContextParallel(const ContextParallel&) = delete;
  ContextParallel& operator=(const ContextParallel&) = delete;

 private:
  struct Restored {
    at::Tensor buffer, whole;
  };
  std::vector<Restored> restored_;
  std::unique_ptr<nn::ContextScope> scope_;
};

struct ScaledDotProductAttentionOptions {
  bool is_causal = false;
  double scale = 0;  // 0: one over the square root of the head's size
  bool enable_gqa = false;
};
// q [B, H, T, d], k and v [B, G, T, d]: at::scaled_dot_product_attention without mask and dropout, or inside a scope of
// this thread over its mesh: then COLLECTIVE over it, as is the backward pass. Errors inside a scope: kConfig,
// attention that is not causal while the sequence lies balanced; kShape, T that is not this rank's part.
at::Tensor scaled_dot_product_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                        const ScaledDotProductAttentionOptions& options);

// The whole of what each rank has a part of, in the order of the sequence, on all ranks; without a gradient. COLLECTIVE
// over the mesh. Errors kShape: another mesh, numbers of buffers and dims that differ, parts that do not lie so.
std::vector<at::Tensor> context_parallel_unshard(const MeshPtr& mesh, const std::vector<at::Tensor>& buffers,
                                                 const std::vector<int64_t>& seq_dims);

// "allgather" (the default) or "alltoall", for scopes that this thread makes from now on. Error kConfig for another.
void set_rotate_method(std::string_view rotate_method);

}  // namespace tessera
