// Sharding rules of argmax and argmin. Each rank finds the extreme value of its shard and the index of this value; the
// ranks then all-gather and compare values and indices. So one value and one index for each reduced line are
// communicated instead of the tensor.
#include <ATen/ATen.h>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/rules/table.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {

namespace {

constexpr int64_t kFlattened = -1;

at::Tensor stacked_over(comm::Group& group, const at::Tensor& part) {
  Sizes sizes{group.size()};
  sizes.append(part.sizes().begin(), part.sizes().end());
  at::Tensor all = at::empty(sizes, part.options());
  comm::all_gather_into(group, all, part.contiguous(), "argmax").wait();
  return all;
}

struct ArgExtremeSearch {
  bool maximum;
  int64_t dim;                     // kFlattened: all dims
  std::vector<int64_t> mesh_dims;  // mesh dims that shard the searched dims, innermost first
  std::vector<int64_t> sizes;      // global
  LocalBox box;
};

// Converts local indices along the searched dim to global indices. For kFlattened these are indices into the flattened
// local and the flattened global tensor.
at::Tensor global_places(const ArgExtremeSearch& search, const at::Tensor& places) {
  if (search.dim != kFlattened) return places + search.box.offset[search.dim];
  at::Tensor rest = places;
  at::Tensor global = at::zeros_like(places);
  int64_t step = 1;
  for (size_t i = search.sizes.size(); i-- > 0;) {
    const int64_t extent = std::max<int64_t>(search.box.shape[i], 1);
    global = global + (rest.remainder(extent) + search.box.offset[i]) * step;
    rest = rest.floor_divide(extent);
    step *= search.sizes[i];
  }
  return global;
}

// Returns the extreme values of this rank's shard along the searched dim, which stays with size 1, and their global
// indices. A shard without elements gives the index -1.
std::pair<at::Tensor, at::Tensor> search_part(const ArgExtremeSearch& search, const at::Tensor& part) {
  const at::Tensor line = search.dim == kFlattened ? part.reshape({-1}) : part;
  const int64_t dim = search.dim == kFlattened ? 0 : search.dim;
  if (line.size(dim) == 0) {
    Sizes one(line.sizes().begin(), line.sizes().end());
    one[dim] = 1;
    return {at::zeros(one, line.options()), at::full(one, -1, line.options().dtype(at::kLong))};
  }
  const at::Tensor places = search.maximum ? at::argmax(line, dim, true) : at::argmin(line, dim, true);
  return {at::gather(line, dim, places), global_places(search, places)};
}

// Reduces the gathered values (dim 0: the ranks) to the extreme value and its index. As on one device, the smallest
// index of equal values is returned, and NaN is more extreme than every number.
std::pair<at::Tensor, at::Tensor> best_of(bool maximum, const at::Tensor& values, const at::Tensor& places) {
  at::Tensor best = values.select(0, 0);
  at::Tensor place = places.select(0, 0);
  for (int64_t i = 1; i < values.size(0); ++i) {
    const at::Tensor value = values.select(0, i);
    const at::Tensor at = places.select(0, i);
    const at::Tensor nan = value.ne(value);
    const at::Tensor nan_before = best.ne(best);
    const at::Tensor beyond =
        (maximum ? value.gt(best) : value.lt(best)).logical_or_(nan.logical_and(nan_before.logical_not()));
    const at::Tensor first = value.eq(best).logical_or_(nan.logical_and(nan_before)).logical_and_(at.lt(place));
    const at::Tensor better = beyond.logical_or(first).logical_or_(place.lt(0)).logical_and_(at.ge(0));
    best = at::where(better, value, best);
    place = at::where(better, at, place);
  }
  return {best, place};
}

LocalFunction search_over(ArgExtremeSearch search, Sizes local_result) {
  return [search = std::move(search), local_result](const LocalCall& local) {
    auto [values, places] = search_part(search, local.arg(0).toTensor());
    for (const int64_t mesh_dim : search.mesh_dims) {
      comm::Group& group = *local.mesh.group(mesh_dim);
      std::tie(values, places) = best_of(search.maximum, stacked_over(group, values), stacked_over(group, places));
    }
    local.finish({places.reshape(local_result)});
  };
}

// argmax(self, dim, keepdim). The searched dim may be sharded, because the LocalFunction combines the results of the
// ranks.
void propose_arg_extreme(const OpCall& call, Proposal& proposal, bool maximum) {
  const TensorInput& self = call.inputs[0];
  const bool flattened = !call.has(1) || self.dim() == 0;
  const int64_t searched = flattened ? kFlattened : checked_dim(call, call.int_at(1), self.dim());
  const bool keepdim = call.bool_at(2);
  std::vector<int64_t> sizes;
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    const bool gone = flattened || dim == searched;
    if (is_sharded_on(self, dim)) {
      proposal.strategies.push_back({{gone ? Replicate() : Shard(static_cast<int64_t>(sizes.size()))}, {Shard(dim)}});
    }
    if (!gone || keepdim) sizes.push_back(gone ? 1 : self.sizes[dim]);
  }
  proposal.supports_strided = false;
  proposal.output(sizes);
  proposal.local = [=](const OpCall& of, const PlacementChoice& choice) -> LocalFunction {
    ArgExtremeSearch search{maximum, searched, {}, of.inputs[0].sizes.vec(), {}};
    for (size_t m = choice.inputs[0].size(); m-- > 0;) {
      const Placement& p = choice.inputs[0][m];
      if (p.is_shard() && (searched == kFlattened || p.dim == searched)) {
        search.mesh_dims.push_back(static_cast<int64_t>(m));
      }
    }
    const bool nothing =
        searched == kFlattened ? c10::multiply_integers(search.sizes) == 0 : search.sizes[searched] == 0;
    // If the searched dim is empty, the operation itself runs and raises its error.
    if (search.mesh_dims.empty() || !of.mesh->coordinate() || nothing) return nullptr;
    search.box = local_box(search.sizes, *of.mesh, choice.inputs[0]);
    return search_over(std::move(search), local_sizes(sizes, *of.mesh, choice.outputs[0]));
  };
}

}  // namespace

void add_arg_extreme_rules(RuleTable& table) {
  table.add("aten::argmax", [](const OpCall& call, Proposal& proposal) { propose_arg_extreme(call, proposal, true); });
  table.add("aten::argmin", [](const OpCall& call, Proposal& proposal) { propose_arg_extreme(call, proposal, false); });
}

}  // namespace tessera
