// Table look-ups and other operations with index tensors.
#include <ATen/ATen.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/rules/table.h"

namespace tessera::detail {

namespace {

// Rows [offset, offset + local rows) of the table lie here: other rows count as zero, to be summed over the ranks.
LocalFunction look_up_own_rows(int64_t offset) {
  return [offset](const LocalCall& local) {
    const at::Tensor weight = local.arg(0).toTensor();
    const at::Tensor indices = local.arg(1).toTensor();
    if (weight.size(0) == 0) {
      Sizes sizes(indices.sizes().begin(), indices.sizes().end());
      sizes.push_back(weight.size(1));
      local.finish({at::zeros(sizes, weight.options())});
      return;
    }
    const at::Tensor shifted = indices - offset;
    const at::Tensor elsewhere = shifted.lt(0).logical_or_(shifted.ge(weight.size(0)));
    at::Tensor rows = at::embedding(weight, shifted.masked_fill(elsewhere, 0));
    rows.masked_fill_(elsewhere.unsqueeze(-1), 0);
    local.finish({rows});
  };
}

// embedding(weight, indices, padding_idx, ...)
void propose_embedding(const OpCall& call, Proposal& proposal) {
  const TensorInput& weight = call.inputs[0];
  const TensorInput& indices = call.inputs[1];
  for (int64_t dim = 0; dim < indices.dim(); ++dim) {
    if (is_sharded_on(indices, dim)) {
      proposal.strategies.push_back({{Shard(dim)}, {Replicate(), Shard(dim)}});
    }
  }
  proposal.strategies.push_back({{Shard(indices.dim())}, {Shard(1), Replicate()}});
  // Looking up is linear in the table.
  for (const Placement& p : partials_among(call)) {
    if (p.is_partial(ReduceOp::kSum) || p.is_partial(ReduceOp::kAvg)) {
      proposal.strategies.push_back({{p}, {p, Replicate()}});
    }
  }
  if (is_sharded_on(weight, 0)) {
    proposal.strategies.push_back({{Partial()}, {Shard(0), Replicate()}});
  }
  proposal.strided = false;
  std::vector<int64_t> sizes = indices.sizes.vec();
  sizes.push_back(weight.sizes[1]);
  proposal.output(sizes);
  proposal.local = [](const OpCall& of, const Choice& choice) -> LocalFunction {
    for (const auto& placement : choice.inputs[0]) {
      if (placement.is_shard(0) && of.mesh->coordinate()) {
        return look_up_own_rows(local_box(of.inputs[0].sizes.vec(), *of.mesh, choice.inputs[0]).offset[0]);
      }
    }
    return nullptr;
  };
}

// embedding_dense_backward(grad, indices, num_weights, padding_idx, scale_grad_by_freq)
void propose_embedding_backward(const OpCall& call, Proposal& proposal) {
  const TensorInput& gradient = call.inputs[0];
  const TensorInput& indices = call.inputs[1];
  if (!call.bool_at(4)) {
    for (int64_t dim = 0; dim < indices.dim(); ++dim) {
      proposal.strategies.push_back({{Partial()}, {Shard(dim), Shard(dim)}});
    }
  }
  proposal.strategies.push_back({{Shard(1)}, {Shard(gradient.dim() - 1), Replicate()}});
  for (const Placement& p : partials_among(call)) {
    if (p.is_partial(ReduceOp::kSum) || p.is_partial(ReduceOp::kAvg)) {
      proposal.strategies.push_back({{p}, {p, Replicate()}});
    }
  }
  proposal.output({call.int_at(2), gradient.sizes.back()});
}

// gather(self, dim, index): dims other than `dim` are independent where both have the same size.
void propose_gather(const OpCall& call, Proposal& proposal) {
  const TensorInput& self = call.inputs[0];
  const TensorInput& index = call.inputs[1];
  const int64_t gathered = wrap_dim(call.int_at(1), self.dim());
  for (int64_t dim = 0; dim < index.dim(); ++dim) {
    if (dim == gathered) {
      proposal.strategies.push_back({{Shard(dim)}, {Replicate(), Shard(dim)}});
    } else if (self.sizes[dim] == index.sizes[dim]) {
      proposal.strategies.push_back({{Shard(dim)}, {Shard(dim), Shard(dim)}});
    }
  }
  for (const Placement& p : partials_among(call)) {
    proposal.strategies.push_back({{p}, {p, Replicate()}});
  }
  proposal.output(index.sizes);
}

// scatter(self, dim, index, src or value), scatter_add likewise: independent along dims that all have in the same size.
void propose_scatter(const OpCall& call, Proposal& proposal) {
  const TensorInput& self = call.inputs[0];
  const TensorInput& index = call.inputs[1];
  const int64_t dim_written = wrap_dim(call.int_at(1), self.dim());
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    bool alike = dim != dim_written && self.sizes[dim] == index.sizes[dim];
    for (const auto& input : call.inputs) {
      alike = alike && input.dim() == self.dim() && input.sizes[dim] == self.sizes[dim];
    }
    if (alike) {
      proposal.strategies.push_back({{Shard(dim)}, c10::SmallVector<Placement, 4>(call.inputs.size(), Shard(dim))});
    }
  }
  proposal.output(self.sizes);
}

// index_select(self, dim, index)
void propose_index_select(const OpCall& call, Proposal& proposal) {
  const TensorInput& self = call.inputs[0];
  const TensorInput& index = call.inputs[1];
  const int64_t selected = wrap_dim(call.int_at(1), self.dim());
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    if (dim == selected && index.dim() == 1) {
      proposal.strategies.push_back({{Shard(dim)}, {Replicate(), Shard(0)}});
    } else if (dim != selected) {
      proposal.strategies.push_back({{Shard(dim)}, {Shard(dim), Replicate()}});
    }
  }
  for (const Placement& p : partials_among(call)) {
    proposal.strategies.push_back({{p}, {p, Replicate()}});
  }
  std::vector<int64_t> sizes = self.sizes.vec();
  sizes[selected] = c10::multiply_integers(index.sizes);
  proposal.output(sizes);
}

// index(self, indices?): dims of self that are not indexed keep their shards, indexed ones must be whole.
void propose_index(const OpCall& call, Proposal& proposal) {
  const TensorInput& self = call.inputs[0];
  const size_t count = call.inputs.size();
  std::vector<bool> indexed(self.dim(), false);
  int64_t broadcast_dims = 0;
  bool masks = false;
  for (size_t i = 1; i < count; ++i) {
    indexed[call.inputs[i].element] = true;
    broadcast_dims = std::max(broadcast_dims, call.inputs[i].dim());
    const auto type = call.inputs[i].tensor->scalar_type();
    masks = masks || type == at::kBool || type == at::kByte;
  }
  TESSERA_CHECK(!masks, ErrorKind::kShape,
                "[dtensor.dispatch] {}: the shape of what a mask selects depends on data. Use where, masked_fill or index "
                "tensors, or work on full_tensor().", call.describe());
  // Result: the broadcast indices stand where the first index is, or in front when indexed dims are apart.
  int64_t first = self.dim();
  int64_t last = -1;
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    if (indexed[dim]) {
      first = std::min(first, dim);
      last = dim;
    }
  }
  bool together = true;
  for (int64_t dim = first; dim <= last; ++dim) {
    together = together && indexed[dim];
  }
  const int64_t front = together ? first : 0;
  int64_t seen = 0;
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    if (indexed[dim]) {
      continue;
    }
    const int64_t position = seen < front ? seen : seen + broadcast_dims;
    ++seen;
    Strategy strategy{{Shard(position)}, c10::SmallVector<Placement, 4>(count, Replicate())};
    strategy.inputs[0] = Shard(dim);
    proposal.strategies.push_back(std::move(strategy));
  }
  for (int64_t dim = 0; dim < broadcast_dims; ++dim) {
    Strategy strategy{{Shard(front + dim)}, {Replicate()}};
    bool usable = false;
    for (size_t i = 1; i < count; ++i) {
      const int64_t own = dim - (broadcast_dims - call.inputs[i].dim());
      const bool whole = own < 0 || call.inputs[i].sizes[own] == 1;
      strategy.inputs.push_back(whole ? Replicate() : Shard(own));
      usable = usable || !whole;
    }
    if (usable) {
      proposal.strategies.push_back(std::move(strategy));
    }
  }
  for (const Placement& p : partials_among(call)) {
    Strategy strategy{{p}, c10::SmallVector<Placement, 4>(count, Replicate())};
    strategy.inputs[0] = p;
    proposal.strategies.push_back(std::move(strategy));
  }
}

// index_put(self, indices, values, accumulate): only whole, so that no write is lost or made twice.
void propose_whole(const OpCall& call, Proposal& proposal) { proposal.output(call.inputs[0].sizes); }

}  // namespace

void add_embedding_rules(RuleTable& table) {
  table.add("aten::embedding", propose_embedding);
  table.add("aten::embedding_dense_backward", propose_embedding_backward);
  table.add("aten::gather", propose_gather);
  table.add({"aten::scatter", "aten::scatter_add", "aten::scatter_reduce"}, propose_scatter);
  table.add("aten::index_select", propose_index_select);
  table.add({"aten::index", "aten::_unsafe_index"}, propose_index);
  table.add({"aten::index_put", "aten::_index_put_impl_", "aten::_unsafe_index_put", "aten::index_add", "aten::index_copy",
             "aten::index_fill"}, propose_whole);
}

}  // namespace tessera::detail
