// Sharding rules of cat and stack.
#include "tessera/base/error.h"
#include "tessera/dtensor/rules/table.h"
#include "tessera/dtensor/tensor/layout.h"

namespace tessera {

namespace {

bool is_legacy_empty(const TensorInput& input) { return input.dim() == 1 && input.sizes[0] == 0; }

// Whether operands with the placement `partial` need not be reduced before they are concatenated. The result is later
// reduced in the promoted dtype of all operands, so promotion must not change the reduced value.
bool keeps_value_when_promoted(const OpCall& call, const Placement& partial) {
  const auto first = call.inputs[0].tensor->scalar_type();
  const auto any = [&](auto&& predicate) { return std::ranges::any_of(call.inputs, predicate); };
  if (!any([&](const TensorInput& input) { return input.tensor->scalar_type() != first; })) return true;
  // Sums over ranks of integers that are narrower than the promoted dtype `together` wrap around, but sums in
  // `together` would not. So a Partial operand with such a narrower dtype must be reduced before the concatenation.
  auto together = first;
  for (const auto& input : call.inputs) together = c10::promoteTypes(together, input.tensor->scalar_type());
  const bool wraps = is_additive(partial) && any([&](const TensorInput& input) {
                       const auto type = input.tensor->scalar_type();
                       return type != together && at::isIntegralType(type, /*includeBool=*/true) &&
                              std::ranges::any_of(input.placements, [](const Placement& p) { return p.is_partial(); });
                     });
  const auto passing = partials_among(call);
  return !wraps && std::ranges::find(passing, partial) != passing.end() &&
         (is_additive(partial) || !any([](const TensorInput& input) { return input.tensor->is_complex(); }));
}

// For each operand, in order, proposes that all operands and the result get the present placement of this operand.
// Placements that shard the concatenated dim are not proposed.
void propose_cat(const OpCall& call, Proposal& proposal) {
  TESSERA_CHECK(!call.inputs.empty(), ErrorKind::kShape, "[dtensor.dispatch] {}: found no tensors.", call.describe());
  const auto other_than_empty = std::ranges::find_if_not(call.inputs, is_legacy_empty);
  const TensorInput& example = other_than_empty == call.inputs.end() ? call.inputs[0] : *other_than_empty;
  const int64_t joined = checked_dim(call, call.int_at(1), example.dim());
  proposal.by_mesh_dim.resize(call.mesh->ndim());
  for (int64_t m = 0; m < call.mesh->ndim(); ++m) {
    auto& strategies = proposal.by_mesh_dim[m];
    for (const auto& input : call.inputs) {
      Placement followed = input.placements[m];
      if (is_legacy_empty(input) || followed.is_replicate() || (followed.is_any_shard() && followed.dim == joined) ||
          (followed.is_partial() && !keeps_value_when_promoted(call, followed))) {
        continue;
      }
      Strategy strategy{{followed}, {}};
      for (const auto& other : call.inputs) {
        strategy.inputs.push_back(is_legacy_empty(other) ? other.placements[m] : followed);
      }
      strategies.push_back(std::move(strategy));
    }
  }
  std::vector<int64_t> sizes = example.sizes.vec();
  sizes[joined] = 0;
  for (const auto& input : call.inputs) {
    if (!is_legacy_empty(input)) {
      TESSERA_CHECK(input.dim() == example.dim(), ErrorKind::kShape,
                    "[dtensor.dispatch] {}: found tensors of {} and {} dims, wanted the same.", call.describe(),
                    example.dim(), input.dim());
      sizes[joined] += input.sizes[joined];
    }
  }
  proposal.supports_strided = false;  // the strategies have the operands' StridedShards already
  proposal.output(sizes);
}

// stack(tensors, dim): on each mesh dim all operands get one common placement. A Shard of some operands takes
// precedence over Replicate and Partial, a Partial over Replicate. Two different Shards or Partials give Replicate, as
// in PyTorch.
void propose_stack(const OpCall& call, Proposal& proposal) {
  TESSERA_CHECK(!call.inputs.empty(), ErrorKind::kShape, "[dtensor.dispatch] {}: found no tensors.", call.describe());
  const int64_t ndim = call.inputs[0].dim();
  const int64_t added = wrap_dim(call.int_at(1), ndim + 1);
  Placements common;
  Placements result;
  for (int64_t m = 0; m < call.mesh->ndim(); ++m) {
    Placement merged = call.inputs[0].placements[m];
    for (const auto& input : call.inputs) {
      const Placement& next = input.placements[m];
      if (next == merged || next.is_replicate()) continue;
      const bool takes_over = merged.is_replicate() || (merged.is_partial() && next.is_any_shard());
      const bool gives_way = merged.is_any_shard() && next.is_partial();
      if (takes_over) {
        merged = next;
      } else if (!gives_way) {
        merged = Replicate();
        break;
      }
    }
    const bool norm = merged.kind == Placement::Kind::kNormPartial;  // no other placement can become a partial norm
    const bool mixed = norm && std::ranges::any_of(call.inputs, [&](const TensorInput& input) {
                         return input.placements[m] != merged;
                       });
    const bool alone = std::ranges::all_of(
        common, [&](const Placement& p) { return !p.is_partial() || can_combine_partials(p, merged); });
    if (mixed || (merged.is_partial() && (!alone || !keeps_value_when_promoted(call, merged)))) merged = Replicate();
    common.push_back(merged);
    if (merged.is_any_shard() && merged.dim >= added) ++merged.dim;
    result.push_back(merged);
  }
  proposal.choice = PlacementChoice{std::vector<Placements>(call.inputs.size(), common), {result}};
  std::vector<int64_t> sizes = call.inputs[0].sizes.vec();
  sizes.insert(sizes.begin() + added, static_cast<int64_t>(call.inputs.size()));
  proposal.output(sizes);
}

}  // namespace

void add_cat_rules(RuleTable& table) {
  table.add({"aten::cat", "aten::_cat", "aten::concat"}, propose_cat);
  table.add({"aten::stack", "aten::_stack"}, propose_stack);
}

}  // namespace tessera
