// Sharding rules of views of the same bytes with another dtype.
#include <ATen/ATen.h>

#include "tessera/dtensor/rules/table.h"

namespace tessera {

namespace {

// view_as_real(self [...]) -> [..., 2]. Reductions of complex numbers reduce real and imaginary parts separately, so a
// Partial self gives a result with this placement.
void propose_as_real(const OpCall& call, Proposal& proposal) {
  const TensorInput& self = call.inputs[0];
  for (int64_t dim = 0; dim < self.dim(); ++dim) proposal.strategies.push_back({{Shard(dim)}, {Shard(dim)}});
  add_pass_through(call, proposal, 0, passes_all);
}

// view_as_complex(self [..., 2]) -> [...]
void propose_as_complex(const OpCall& call, Proposal& proposal) {
  const TensorInput& self = call.inputs[0];
  for (int64_t dim = 0; dim + 1 < self.dim(); ++dim) proposal.strategies.push_back({{Shard(dim)}, {Shard(dim)}});
  add_linear(call, proposal, 0);
  // ATen's kernel also checks the strides of dims of size 0 or 1, which have no meaning in a local tensor. They are
  // replaced by strides that the kernel accepts.
  proposal.local = [](const OpCall& of, const PlacementChoice&) -> LocalFunction {
    if (of.name() != "aten::view_as_complex") return nullptr;
    return [](const LocalCall& local) {
      const at::Tensor part = local.arg(0).toTensor();
      std::vector<int64_t> strides = part.strides().vec();
      for (int64_t dim = 0; dim < part.dim(); ++dim) {
        if (part.size(dim) <= 1 || part.numel() == 0) strides[static_cast<size_t>(dim)] = dim + 1 < part.dim() ? 2 : 1;
      }
      local.finish({at::view_as_complex(part.as_strided(part.sizes(), strides))});
    };
  };
}

// view(self, dtype): the size of the last dim changes with the element size. The last dim may be sharded only if all
// shards are equal and each consists of complete elements of both dtypes. A Partial self must be reduced before its
// bytes are reinterpreted.
void propose_view_dtype(const OpCall& call, Proposal& proposal) {
  const TensorInput& self = call.inputs[0];
  const auto from = static_cast<int64_t>(self.tensor->element_size());
  const auto to = static_cast<int64_t>(c10::elementSize(static_cast<at::ScalarType>(call.int_at(1))));
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    const bool even = self.sizes[dim] % (call.mesh->size() * std::max<int64_t>(to / from, 1)) == 0;
    if (from == to || dim + 1 < self.dim() || even) proposal.strategies.push_back({{Shard(dim)}, {Shard(dim)}});
  }
  proposal.supports_strided = from == to;
  const bool same_type = self.tensor->scalar_type() == static_cast<at::ScalarType>(call.int_at(1));
  if (same_type) add_pass_through(call, proposal, 0, passes_all);
}

}  // namespace

void add_reinterpreting_view_rules(RuleTable& table) {
  table.add({"aten::view_as_real", "aten::_view_as_real_physical", "aten::view_as_real_copy"}, propose_as_real);
  table.add({"aten::view_as_complex", "aten::view_as_complex_copy"}, propose_as_complex);
  table.add({"aten::view.dtype", "aten::view_copy.dtype"}, propose_view_dtype);
}

}  // namespace tessera
