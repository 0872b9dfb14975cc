// Sharding rules of embedding and its backward.
#include <ATen/ATen.h>

#include "tessera/dtensor/rules/table.h"

namespace tessera {

namespace {

// Looks up the rows of the weight that this rank's shard holds; the shard starts at row `offset` of the `rows_in_all`
// global rows. Indices of other rows give zeros, so the result is Partial(sum).
LocalFunction look_up_own_rows(int64_t offset, int64_t rows_in_all) {
  return [offset, rows_in_all](const LocalCall& local) {
    const at::Tensor weight = local.arg(0).toTensor();
    const at::Tensor indices = local.arg(1).toTensor();
    check_indices(local.op.name, indices, rows_in_all);
    if (weight.size(0) == 0) {
      Sizes sizes(indices.sizes().begin(), indices.sizes().end());
      sizes.push_back(weight.size(1));
      local.finish({at::zeros(sizes, weight.options())});
      return;
    }
    const auto [own, is_remote] = to_local_indices(indices, offset, weight.size(0));
    local.finish({at::embedding(weight, own).masked_fill_(is_remote.unsqueeze(-1), 0)});
  };
}

// embedding(weight, indices, padding_idx, ...)
void propose_embedding(const OpCall& call, Proposal& proposal) {
  const TensorInput& weight = call.inputs[0];
  const TensorInput& indices = call.inputs[1];
  for (int64_t dim = 0; dim < indices.dim(); ++dim) {
    proposal.strategies.push_back({{Shard(dim)}, {Replicate(), Shard(dim)}});
  }
  proposal.strategies.push_back({{Shard(indices.dim())}, {Shard(1), Replicate()}});
  add_linear(call, proposal, 0);  // the result is linear in the weight
  if (is_sharded_on(weight, 0)) proposal.strategies.push_back({{Partial()}, {Shard(0), Replicate()}});
  proposal.supports_strided = false;
  proposal.allows_new_shards = true;
  std::vector<int64_t> sizes = indices.sizes.vec();
  sizes.push_back(weight.sizes[1]);
  proposal.output(sizes);
  proposal.local = [](const OpCall& of, const PlacementChoice& choice) -> LocalFunction {
    const auto offset = local_offset(of, choice, 0);
    return offset ? look_up_own_rows(*offset, of.inputs[0].sizes[0]) : nullptr;
  };
}

// embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq)
void propose_embedding_backward(const OpCall& call, Proposal& proposal) {
  const TensorInput& gradient = call.inputs[0];
  const TensorInput& indices = call.inputs[1];
  proposal.strategies.push_back({{Shard(1)}, {Shard(gradient.dim() - 1), Replicate()}});
  if (!call.bool_at(4)) {
    for (int64_t dim = 0; dim < indices.dim(); ++dim) {
      proposal.strategies.push_back({{Partial()}, {Shard(dim), Shard(dim)}});
    }
  }
  add_linear(call, proposal, 0);
  proposal.allows_new_shards = true;
  proposal.output({call.int_at(2), gradient.sizes.back()});
}

}  // namespace

void add_embedding_rules(RuleTable& table) {
  table.add("aten::embedding", propose_embedding);
  table.add("aten::embedding_dense_backward", propose_embedding_backward);
}

}  // namespace tessera
