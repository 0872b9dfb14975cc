#include "tessera/parallel/experts/token_exchange.h"

#include <ATen/ATen.h>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/functional.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/kernels/linear/permute_rows.h"
#include "tessera/mesh/host_memory.h"

namespace tessera {
namespace {

std::vector<int64_t> row_sums(const at::Tensor& counts) {
  const auto sums = counts.sum(1).contiguous();
  return {sums.const_data_ptr<int64_t>(), sums.const_data_ptr<int64_t>() + sums.numel()};
}

// Exchanges row counts. counts[r][e] is the number of rows that this rank sends for expert e of rank r. In the result,
// which is on the CPU, [r][e] is the number of rows that rank r sends for expert e of this rank.
at::Tensor exchange_counts(const at::Tensor& counts, const DeviceMesh& mesh) {
  const auto sent = to_device_async(mesh.device(), counts).contiguous();
  auto received = at::empty_like(sent);
  comm::all_to_all_single(*mesh.group(0), received, sent, {}, {}, "tokens of each expert").wait();
  return received.to(at::kCPU);
}

// The permutation from (rank, expert) order to (expert, rank) order. Rows arrive grouped by sending rank and then by
// expert, as counts [ranks, experts] says; a grouped matrix product needs all rows of one expert together.
at::Tensor by_expert_then_rank(const at::Tensor& counts) {
  const int64_t ranks = counts.size(0), experts = counts.size(1);
  const auto* rows = counts.const_data_ptr<int64_t>();
  std::vector<int64_t> begins(static_cast<size_t>(counts.numel()));
  int64_t total = 0;
  for (size_t i = 0; i < begins.size(); total += rows[i++]) begins[i] = total;
  auto order = at::empty({total}, at::kLong);
  auto* to = order.mutable_data_ptr<int64_t>();
  for (int64_t expert = 0; expert < experts; ++expert) {
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const int64_t from = rank * experts + expert;
      for (int64_t i = 0; i < rows[from]; ++i) *to++ = begins[static_cast<size_t>(from)] + i;
    }
  }
  return order;
}

at::Tensor flat(const at::Tensor& mask) { return mask.defined() ? mask.reshape({-1}) : mask; }

// Returns this rank's shard of `tensor` along `dim`; the shard is empty if the dim is too short to give every rank a
// part. Returns an undefined tensor unchanged.
at::Tensor local_shard(const at::Tensor& tensor, int64_t dim, const DeviceMesh& mesh) {
  if (!tensor.defined()) return tensor;
  const auto range = local_range(tensor.size(dim), mesh.size(0), mesh.local_rank(0));
  return tensor.narrow(dim, std::min(range.offset, tensor.size(dim)), range.size);
}

}  // namespace

// One all-to-all sends the rows to the experts, and another sends the results back. The counts are exchanged first,
// because sender and receiver must know the sizes of an uneven all-to-all. The second all-to-all uses the sizes of the
// first in the opposite direction, so the results arrive in the order of `sorted`. Backward runs both all-to-alls in
// the opposite direction. Every rank calls all of them, even without rows, so no rank waits for ever.
at::Tensor AllToAllExchange::run_experts(nn::MoE& block, const at::Tensor& sorted, const at::Tensor& counts) const {
  const int64_t ranks = experts_->size(0);
  if (ranks == 1) return (*block.experts)(sorted, counts);
  const auto sent = counts.view({ranks, counts.numel() / ranks});
  const auto received = exchange_counts(sent, *experts_);
  const auto send_sizes = row_sums(sent), receive_sizes = row_sums(received);
  const functional::MeshAxis axis{experts_, 0};
  const auto arrived = functional::all_to_all(sorted, axis, receive_sizes, send_sizes);
  const auto order = to_device_async(sorted.device(), by_expert_then_rank(received));
  const auto inverse = kernels::inverse_permutation(order);
  const auto results = (*block.experts)(kernels::permute_rows(arrived, order, inverse), received.sum(0));
  return functional::all_to_all(kernels::permute_rows(results, inverse, order), axis, send_sizes, receive_sizes);
}

at::Tensor AllToAllExchange::forward_local_rows(nn::MoE& block, const at::Tensor& rows, int64_t length,
                                                const at::Tensor& mask) const {
  const auto [routing, order] = block.route(rows, length, nn::NonPaddingMask{mask});
  const auto sorted = nn::permute_to_experts(rows, order, block.experts_per_token());
  return nn::unpermute_and_combine(run_experts(block, sorted, order.counts), order, routing.weights);
}

// Runs the MoE block on this rank's shard of the sequences. x [B, T, width] and the result are DTensors Shard(1) over
// `replicas_`. `mask`, if defined, has a value for every token of the whole sequences, so the function selects the
// values of this rank's tokens from `mask`.
at::Tensor AllToAllExchange::forward_sequence_shard(nn::MoE& block, const at::Tensor& x, const at::Tensor& mask) const {
  const auto here = to_local(x);
  const auto own = mask.defined() ? local_shard(mask, 1, *replicas_) : mask;
  const auto y =
      forward_local_rows(block, here.reshape({-1, here.size(-1)}), here.size(1), flat(own)).view(here.sizes());
  return from_local(y, replicas_, {Shard(1)}, FromLocalOptions::contiguous(x.sizes().vec()));
}

// Runs the MoE block on a plain tensor x that is equal on all ranks of `replicas_`; the result is plain and equal on
// these ranks, too. Each rank computes a shard of the rows, and the results of the shards are all-gathered. In backward
// the gradients of the shards of x are all-gathered, so every rank has the gradient of the whole x.
at::Tensor AllToAllExchange::forward_replicated(nn::MoE& block, const at::Tensor& x, const at::Tensor& mask) const {
  const auto rows = x.reshape({-1, x.size(-1)});
  const auto own = redistribute(from_local(rows, replicas_, {Replicate()}), {Shard(0)});
  const auto y = forward_local_rows(block, to_local(own), x.size(-2), local_shard(flat(mask), 0, *replicas_));
  const auto all = from_local(y, replicas_, {Shard(0)}, FromLocalOptions::contiguous(rows.sizes().vec()));
  return to_local(redistribute(all, {Replicate()})).view(x.sizes());
}

at::Tensor AllToAllExchange::run(nn::MoE& block, const at::Tensor& x, const nn::NonPaddingMask& real) {
  if (!replicas_) {
    TESSERA_CHECK(!is_dtensor(x), ErrorKind::kShape,
                  "[parallel.experts] tokens: found a DTensor {} over {}, wanted a plain tensor. Pass that mesh to "
                  "apply_expert_parallel as tensor_parallel.",
                  to_string(placements(x)), device_mesh(x)->to_string());
    return forward_local_rows(block, x.reshape({-1, x.size(-1)}), x.size(-2), flat(real.mask)).view(x.sizes());
  }
  TESSERA_CHECK(!is_dtensor(x) || *device_mesh(x) == *replicas_, ErrorKind::kShape,
                "[parallel.experts] tokens: found a DTensor over {}, wanted one over the tensor_parallel mesh {}. Use "
                "one mesh for both.",
                device_mesh(x)->to_string(), replicas_->to_string());
  if (sequence_parallel_) {
    const auto distributed = is_dtensor(x) ? x : from_local(x, replicas_, {Replicate()});
    return forward_sequence_shard(block, redistribute(distributed, {Shard(1)}), real.mask);
  }
  return forward_replicated(block, is_dtensor(x) ? to_local(redistribute(x, {Replicate()})) : x, real.mask);
}

}  // namespace tessera
