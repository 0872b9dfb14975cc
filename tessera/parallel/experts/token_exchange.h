// Carries the tokens of expert parallelism. Internal to parallel/experts.
#pragma once

#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/experts/moe.h"

namespace tessera {

// Runs a block whose experts are spread over `experts` (1-d), with tokens that are alike along `replicas` (1-d or
// null). run() is COLLECTIVE over both, and so is its backward.
class AllToAllExchange : public nn::TokenExchange {
 public:
  AllToAllExchange(MeshPtr experts, MeshPtr replicas, bool sequence_parallel)
      : experts_(std::move(experts)), replicas_(std::move(replicas)), sequence_parallel_(sequence_parallel) {}
  at::Tensor run(nn::MoE& block, const at::Tensor& x, const nn::RealTokens& real) override;

 private:
  // rows [N, width] that no other rank has, of sequences of `length` tokens.
  at::Tensor of_own_rows(nn::MoE& block, const at::Tensor& rows, int64_t length, const at::Tensor& mask) const;
  at::Tensor results_of(nn::MoE& block, const at::Tensor& sorted, const at::Tensor& counts) const;
  at::Tensor of_sequence_shards(nn::MoE& block, const at::Tensor& x, const at::Tensor& mask) const;
  at::Tensor of_replicas(nn::MoE& block, const at::Tensor& x, const at::Tensor& mask) const;

  MeshPtr experts_, replicas_;
  bool sequence_parallel_;
};

}  // namespace tessera
