// The all-to-all of expert parallelism. Internal to parallel/experts.
#pragma once

#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/experts/moe.h"

namespace tessera {

// Runs a mixture-of-experts block whose experts are sharded over `experts` (1-d). The tokens are equal along `replicas`
// (1-d or null), or sharded over it with sequence_parallel. run() and its backward are COLLECTIVE over both meshes.
class AllToAllExchange : public nn::TokenDispatcher {
 public:
  AllToAllExchange(MeshPtr experts, MeshPtr replicas, bool sequence_parallel)
      : experts_(std::move(experts)), replicas_(std::move(replicas)), sequence_parallel_(sequence_parallel) {}
  at::Tensor run(nn::MoE& block, const at::Tensor& x, const nn::NonPaddingMask& real) override;

 private:
  // The block's output for rows [N, width] that only this rank holds, from sequences of `length` tokens. mask [N]: true
  // for tokens that are not padding; undefined: all.
  at::Tensor forward_local_rows(nn::MoE& block, const at::Tensor& rows, int64_t length, const at::Tensor& mask) const;
  // Returns the experts' results for the rows `sorted`, which are sorted by expert: sends the rows to the ranks of the
  // experts, and the results back. counts: int64 [all experts] on the CPU, the number of rows of each expert.
  at::Tensor run_experts(nn::MoE& block, const at::Tensor& sorted, const at::Tensor& counts) const;
  // The block's output for x [B, T, width], a DTensor Shard(1) over `replicas`; the output has the same placement.
  at::Tensor forward_sequence_shard(nn::MoE& block, const at::Tensor& x, const at::Tensor& mask) const;
  // The block's output for a plain tensor x that is equal on all ranks of `replicas`. Each rank computes a share of the
  // rows.
  at::Tensor forward_replicated(nn::MoE& block, const at::Tensor& x, const at::Tensor& mask) const;

  MeshPtr experts_, replicas_;
  bool sequence_parallel_;
};

}  // namespace tessera
