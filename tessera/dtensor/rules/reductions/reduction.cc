// Sharding rules of reductions over tensor dims: sums, means, maxima, minima and norms.
#include <cmath>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/dtensor/rules/table.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {

namespace {

struct ReductionDims {
  std::vector<bool> reduced;      // for each dim of self
  std::vector<int64_t> position;  // for each dim of self: its position in the output, -1 if removed
  std::vector<int64_t> sizes;     // of the output
};

ReductionDims read_reduction(const OpCall& call) {
  const TensorInput& self = call.inputs[0];
  const int dim_arg = call.arg_named("dim");
  const std::vector<int64_t> dims = call.ints_at(dim_arg);
  const int keepdim_arg = call.arg_named("keepdim");
  const bool keepdim = keepdim_arg >= 0 && call.bool_at(keepdim_arg);
  ReductionDims result{std::vector<bool>(self.dim(), dims.empty()), std::vector<int64_t>(self.dim(), -1), {}};
  for (const int64_t dim : dims) {
    TESSERA_CHECK(dim >= -std::max<int64_t>(self.dim(), 1) && dim < std::max<int64_t>(self.dim(), 1), ErrorKind::kShape,
                  "[dtensor.dispatch] {}: found dim {}, wanted one of {} dims.", call.describe(), dim, self.dim());
    if (self.dim() > 0) result.reduced[wrap_dim(dim, self.dim())] = true;
  }
  for (int64_t i = 0; i < self.dim(); ++i) {
    if (result.reduced[i] && !keepdim) continue;
    result.position[i] = static_cast<int64_t>(result.sizes.size());
    result.sizes.push_back(result.reduced[i] ? 1 : self.sizes[i]);
  }
  return result;
}

// What the rule requires of the shards of a reduced dim: nothing, at least one element on each rank, or the same number
// of elements on each rank.
enum class ShardRequirement { kNothing, kNonEmpty, kEqual };

struct ReductionKind {
  std::optional<Placement> over_shards;  // result placement if a reduced dim is sharded; nullopt: it must not be
  ShardRequirement needs = ShardRequirement::kNothing;
  bool (*keeps)(const Placement&) = nullptr;  // Partial placements of self that the result may have
};

struct ExtentBounds {
  int64_t smallest;
  int64_t largest;
};

// Returns the smallest and the largest size that a shard of tensor dim `dim`, which has n elements, has on any rank.
// Each split divides the shards of the splits before it, so the function recurses over the splits.
ExtentBounds part_extents(int64_t n, int64_t dim, const DeviceMesh& mesh, c10::ArrayRef<ShardSplit> splits) {
  while (!splits.empty() && splits[0].dim != dim) splits = splits.slice(1);
  if (splits.empty()) return {n, n};
  ExtentBounds all{std::numeric_limits<int64_t>::max(), 0};
  const int64_t k = mesh.shape()[splits[0].mesh_dim];
  for (int64_t i = 0; i < k; ++i) {
    const ExtentBounds inner = part_extents(local_shard_size(n, k, i, splits[0].pieces), dim, mesh, splits.slice(1));
    all = {std::min(all.smallest, inner.smallest), std::max(all.largest, inner.largest)};
  }
  return all;
}

// Whether the shards of all reduced dims meet the ShardRequirement `needs`, which is kNonEmpty or kEqual.
bool meets_requirement(const OpCall& call, const Placements& placements, const std::vector<bool>& reduced,
                       ShardRequirement needs) {
  const ShardSplits splits = shard_splits_of(*call.mesh, placements);
  for (const ShardSplit& split : splits) {
    if (reduced[split.dim]) {
      const ExtentBounds extents = part_extents(call.inputs[0].sizes[split.dim], split.dim, *call.mesh, splits);
      const bool unequal = extents.smallest != extents.largest;
      if (needs == ShardRequirement::kNonEmpty ? extents.smallest == 0 : unequal) return false;
    }
  }
  return true;
}

void propose(const OpCall& call, Proposal& proposal, const ReductionKind& kind) {
  const ReductionDims reduction = read_reduction(call);
  const TensorInput& self = call.inputs[0];
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    if (!is_sharded_on(self, dim)) continue;
    if (!reduction.reduced[dim]) {
      proposal.strategies.push_back({{Shard(reduction.position[dim])}, {Shard(dim)}});
    } else if (kind.over_shards) {
      proposal.strategies.push_back({{*kind.over_shards}, {Shard(dim)}});
    }
  }
  if (kind.keeps != nullptr) add_pass_through(call, proposal, 0, kind.keeps);
  if (kind.over_shards && kind.needs != ShardRequirement::kNothing) {
    proposal.is_legal = [reduced = reduction.reduced, needs = kind.needs](const OpCall& of,
                                                                          const PlacementChoice& choice) {
      return meets_requirement(of, choice.inputs[0], reduced, needs);
    };
  }
  const size_t outputs = call.op.handle.schema().returns().size();
  proposal.outputs.assign(outputs, OutputShape{reduction.sizes, {}});
}

Rule reduction(ReductionKind kind) {
  return [kind](const OpCall& call, Proposal& proposal) { propose(call, proposal, kind); };
}

bool is_average(const Placement& p) { return p.is_partial(ReduceOp::kAvg); }
bool is_max(const Placement& p) { return p.is_partial(ReduceOp::kMax); }
bool is_min(const Placement& p) { return p.is_partial(ReduceOp::kMin); }

// prod(self, dim). Collectives do not multiply complex numbers, so a reduced dim of a complex tensor must not be
// sharded.
void propose_product(const OpCall& call, Proposal& proposal) {
  ReductionKind kind{Partial(ReduceOp::kProduct), ShardRequirement::kNothing, nullptr};
  if (call.inputs[0].tensor->is_complex()) kind.over_shards.reset();
  propose(call, proposal, kind);
}

// any(self, dim): if a reduced dim is sharded, the result is Partial(max). For booleans a Partial(max) self also gives
// a Partial(max) result.
void propose_any(const OpCall& call, Proposal& proposal) {
  const bool truth = call.inputs[0].tensor->scalar_type() == at::kBool;
  propose(call, proposal, {Partial(ReduceOp::kMax), ShardRequirement::kNothing, truth ? is_max : nullptr});
}

// aminmax(self, dim) -> (min, max)
void propose_extremes(const OpCall& call, Proposal& proposal) {
  propose(call, proposal, {Partial(ReduceOp::kMax), ShardRequirement::kNonEmpty, nullptr});
  for (auto& strategy : proposal.strategies) {
    if (strategy.outputs[0].is_partial()) strategy.outputs = {Partial(ReduceOp::kMin), Partial(ReduceOp::kMax)};
  }
}

void propose_count(const OpCall& call, Proposal& proposal) {
  propose(call, proposal, {Partial(ReduceOp::kSum), ShardRequirement::kNothing, nullptr});
  proposal.outputs[0].dtype = at::kLong;
}

// trace(self): the elements of the global diagonal that a rank holds are the diagonal of its local matrix that is
// shifted by the shard's row offset minus its column offset.
void propose_trace(const OpCall& call, Proposal& proposal) {
  const TensorInput& self = call.inputs[0];
  TESSERA_CHECK(self.dim() == 2, ErrorKind::kShape, "[dtensor.dispatch] {}: found {} dims, wanted a matrix.",
                call.describe(), self.dim());
  proposal.strategies = {{{Partial()}, {Shard(0)}}, {{Partial()}, {Shard(1)}}};
  add_linear(call, proposal, 0);
  proposal.supports_strided = false;
  proposal.outputs.push_back(
      {{},
       {},
       at::isIntegralType(self.tensor->scalar_type(), /*includeBool=*/true) ? at::kLong : self.tensor->scalar_type()});
  proposal.local = [](const OpCall& of, const PlacementChoice& choice) -> LocalFunction {
    if (!of.mesh->coordinate()) return nullptr;
    const LocalBox box = local_box(of.inputs[0].sizes.vec(), *of.mesh, choice.inputs[0]);
    return [moved = box.offset[0] - box.offset[1]](const LocalCall& local) {
      local.finish({local.arg(0).toTensor().diagonal(moved).sum()});
    };
  };
}

// norm(self, p, dim): if a reduced dim is sharded, the result is NormPartial(p) for finite p > 0: the norms x of the
// ranks reduce to (sum of x^p)^(1/p). It is Partial(sum) for p = 0 and Partial(max) or Partial(min) for infinite p. For
// negative finite p a reduced dim must not be sharded.
void propose_norm(const OpCall& call, Proposal& proposal) {
  int order_arg = call.arg_named("ord");
  order_arg = order_arg < 0 ? call.arg_named("p") : order_arg;
  const double order = call.has(order_arg) ? call.args[order_arg].toScalar().toDouble() : 2.0;
  ReductionKind kind;
  if (order == std::numeric_limits<double>::infinity()) {
    kind = {Partial(ReduceOp::kMax), ShardRequirement::kNonEmpty, nullptr};
  } else if (order == -std::numeric_limits<double>::infinity()) {
    kind = {Partial(ReduceOp::kMin), ShardRequirement::kNonEmpty, nullptr};
  } else if (order == 0) {
    kind = {Partial(ReduceOp::kSum), ShardRequirement::kNothing, nullptr};
  } else if (order > 0) {
    kind = {NormPartial(static_cast<float>(order)), ShardRequirement::kNothing, nullptr};
  }
  propose(call, proposal, kind);
  // If self is NormPartial of the same order p, the norm of each rank's values is again NormPartial.
  for (const Placement& p : partials_among(call)) {
    if (kind.over_shards && p == *kind.over_shards && p.kind == Placement::Kind::kNormPartial) {
      proposal.strategies.push_back({{p}, {p}});
    }
  }
}

// histc(self, bins, min, max): a sharded self gives a Partial(sum) result, the counts of each rank. This needs min !=
// max. If min == max, histc takes the bounds of the bins from the extremes of self, which must be the global ones, so
// self is replicated.
void propose_histogram(const OpCall& call, Proposal& proposal) {
  if (call.args[2].toScalar().toDouble() != call.args[3].toScalar().toDouble()) {
    for (int64_t dim = 0; dim < call.inputs[0].dim(); ++dim) proposal.strategies.push_back({{Partial()}, {Shard(dim)}});
  }
  proposal.allows_new_shards = true;
  proposal.output({call.int_at(1)});
}

}  // namespace

void add_reduction_rules(RuleTable& table) {
  table.add("aten::sum", reduction({Partial(ReduceOp::kSum), ShardRequirement::kNothing, is_additive}));
  // nansum of a Partial(sum) tensor must reduce the tensor first: each rank would leave out only its own NaN summand,
  // but nansum must leave out the reduced element, which is NaN.
  table.add("aten::nansum", reduction({Partial(ReduceOp::kSum), ShardRequirement::kNothing, nullptr}));
  table.add({"aten::mean"}, reduction({Partial(ReduceOp::kAvg), ShardRequirement::kEqual, is_average}));
  table.add({"aten::prod"}, propose_product);
  table.add({"aten::all"}, reduction({Partial(ReduceOp::kProduct), ShardRequirement::kNothing, nullptr}));
  table.add({"aten::any"}, propose_any);
  table.add({"aten::amax", "aten::max"}, reduction({Partial(ReduceOp::kMax), ShardRequirement::kNonEmpty, is_max}));
  table.add({"aten::amin", "aten::min"}, reduction({Partial(ReduceOp::kMin), ShardRequirement::kNonEmpty, is_min}));
  // These operations return indices or need all elements of a reduced dim at once, so a reduced dim must not be
  // sharded.
  table.add({"aten::max.dim", "aten::max.dim_max", "aten::min.dim", "aten::min.dim_min", "aten::var", "aten::std",
             "aten::var_mean", "aten::std_mean", "aten::logsumexp", "aten::median", "aten::mode", "aten::kthvalue",
             "aten::nanmedian"},
            reduction({}));
  table.add({"aten::linalg_vector_norm", "aten::norm"}, propose_norm);
  table.add("aten::_foreach_norm", zip_rule(propose_norm));
  // The sum of the p-th powers of the elements, from which a norm is computed by the p-th root.
  const Rule powers = reduction({Partial(ReduceOp::kSum), ShardRequirement::kNothing, nullptr});
  table.add("aten::linalg__powsum", powers);
  table.add("aten::_foreach_powsum", zip_rule(powers));
  table.add("aten::histc", propose_histogram);
  table.add("aten::aminmax", propose_extremes);
  table.add("aten::count_nonzero", propose_count);
  table.add("aten::trace", propose_trace);
}

}  // namespace tessera
