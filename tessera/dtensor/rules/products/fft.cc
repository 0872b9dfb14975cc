// Sharding rules of Fourier transforms. They are linear, and the dims that are not transformed may be sharded.
#include "tessera/dtensor/rules/table.h"

namespace tessera {

namespace {

// _fft_c2c(self, dim, ...), _fft_r2c(self, dim, normalization, onesided), _fft_c2r(self, dim, normalization,
// last_dim_size)
void propose(const OpCall& call, Proposal& proposal) {
  const TensorInput& self = call.inputs[0];
  const auto dims = call.ints_at(1);
  std::vector<bool> transformed(self.dim(), false);
  for (const int64_t dim : dims) transformed[checked_dim(call, dim, self.dim())] = true;
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    if (!transformed[dim]) proposal.strategies.push_back({{Shard(dim)}, {Shard(dim)}});
  }
  add_linear(call, proposal, 0);
  proposal.supports_empty_shards = false;
  std::vector<int64_t> sizes = self.sizes.vec();
  if (!dims.empty()) {
    int64_t& last = sizes[wrap_dim(dims.back(), self.dim())];
    const int one_sided = call.arg_named("onesided");
    const int last_size = call.arg_named("last_dim_size");
    last = last_size >= 0 ? call.int_at(last_size) : one_sided >= 0 && call.bool_at(one_sided) ? last / 2 + 1 : last;
  }
  proposal.output(sizes);
}

}  // namespace

void add_fft_rules(RuleTable& table) { table.add({"aten::_fft_c2c", "aten::_fft_r2c", "aten::_fft_c2r"}, propose); }

}  // namespace tessera
