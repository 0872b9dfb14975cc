// PyTorch's context_parallel: while a scope object lives, attention is computed over the ranks of a mesh.
//
//   {
//     ContextParallel scope(mesh, {.buffers = {tokens}, .buffer_seq_dims = {1}});     // [B, T] -> [B, T / ranks]
//     at::Tensor y = scaled_dot_product_attention(q, k, v, {.is_causal = true});      // attention over all ranks
//     out = context_parallel_unshard(mesh, {y}, {2})[0];
//   }                                                                                 // tokens are whole again
//
// Semantics of torch.distributed.tensor.experimental.context_parallel. If 2 * ranks divides the length of the sequence,
// each rank gets one chunk of tokens from the first and one from the second half, which balances causal attention
// (kernels/attention/context_layout.h). Otherwise each rank gets one contiguous shard. The length need not be divisible
// by `ranks`. Use apply_context_parallel for packed rows.
//
// Backward, and recomputation under activation checkpointing, may run after the scope object is destroyed, if the
// attention belongs to a model or uses an attention pattern that was made in the scope. A caller that recomputes
// scaled_dot_product_attention itself must do so inside a scope. Belongs to one rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string_view>
#include <vector>

#include "tessera/mesh/device_mesh.h"

namespace tessera {

namespace nn {
class ContextParallelGuard;
}

struct ContextParallelOptions {
  std::vector<at::Tensor> buffers{};             // plain tensors that need no gradient, each once
  std::vector<int64_t> buffer_seq_dims{};        // the sequence dim of each buffer
  std::vector<at::Tensor> no_restore_buffers{};  // buffers that stay this rank's shard; the whole tensor is freed
};

class ContextParallel {
 public:
  // Replaces the data of the tensors in `buffers` by this rank's shard. Their versions are incremented, so autograd
  // detects a graph that saved one of them. Everything is checked before the first buffer changes. COLLECTIVE over the
  // mesh if its process group does not exist yet. Errors kShape: a mesh that is not 1-d, no buffers, different numbers
  // of buffers and dims, sequences of different lengths, a buffer listed twice, an entry of no_restore_buffers that is
  // not in `buffers`, a buffer that is a DTensor or needs a gradient.
  ContextParallel(const MeshPtr& mesh, const ContextParallelOptions& options);
  // Gives the tensors in `buffers` their whole data again, except those in `no_restore_buffers`. Must run on the thread
  // that constructed the object.
  ~ContextParallel();
  ContextParallel(const ContextParallel&) = delete;
  ContextParallel& operator=(const ContextParallel&) = delete;

 private:
  struct SavedBuffer {
    at::Tensor buffer, whole;
  };
  std::vector<SavedBuffer> saved_buffers_;
  std::unique_ptr<nn::ContextParallelGuard> scope_;
};

struct ScaledDotProductAttentionOptions {
  bool is_causal = false;
  double scale = 0;  // 0: 1 / sqrt(head_dim)
  bool enable_gqa = false;
};
// at::scaled_dot_product_attention without mask and dropout, for q [B, H, T, d], k and v [B, G, T, d]. While this
// thread has a ContextParallel object (a scope), the function attends over the whole sequence of the object's mesh, and
// forward and backward are COLLECTIVE over that mesh. Errors kShape: G other than H without enable_gqa, and inside a
// scope a T that is not this rank's number of tokens; kConfig: non-causal attention inside a scope in which each rank
// has two chunks of tokens.
at::Tensor scaled_dot_product_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                        const ScaledDotProductAttentionOptions& options);

// All-gathers the shards of each buffer. Every rank gets the whole tensors, with the tokens in sequence order. The
// results have no gradient. COLLECTIVE over the mesh. Errors kShape: a mesh that is not 1-d, different numbers of
// buffers and dims, shards whose sizes do not fit the layout.
std::vector<at::Tensor> context_parallel_unshard(const MeshPtr& mesh, const std::vector<at::Tensor>& buffers,
                                                 const std::vector<int64_t>& seq_dims);

// Sets the rotate method, "allgather" (the default) or "alltoall", for scopes that this thread makes afterwards. Error
// kConfig for another value.
void set_rotate_method(std::string_view rotate_method);

}  // namespace tessera
