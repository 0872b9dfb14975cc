// How pointwise operations work on local tensors. pointwise_table.cc lists the operations.
#include "tessera/dtensor/rules/elementwise/pointwise.h"

#include <ATen/native/TypeProperties.h>

#include <algorithm>

#include "tessera/dtensor/random/random_fill.h"

namespace tessera {

namespace {

bool is_fraction(at::ScalarType type) { return at::isFloatingType(type) || at::isComplexType(type); }

// Number of bits of the integers that a type represents without gaps.
int exact_bits(at::ScalarType type) {
  if (at::isIntegralType(type, /*includeBool=*/false)) {
    return 8 * static_cast<int>(c10::elementSize(type)) - (at::isSignedType(type) ? 1 : 0);
  }
  return c10::elementSize(type) > 1 ? digits_of(type) : 1;  // 1 for booleans and 8-bit floating point
}

Placement swapped(const Placement& p) {
  return p.reduce_op == ReduceOp::kMax ? Partial(ReduceOp::kMin) : Partial(ReduceOp::kMax);
}

// The placement of the result if the only operand has placement p. nullopt: the operand must be whole.
std::optional<Placement> result_of_one(const Placement& p, Commutes commutes) {
  const std::optional<Placement> same = p, none = std::nullopt;
  switch (commutes) {
    case Commutes::kCopy:
      return same;
    case Commutes::kNegation:
      return is_extreme(p) ? swapped(p) : is_additive(p) ? same : none;
    case Commutes::kScaling:
      return is_extreme(p) || is_additive(p) ? same : none;
    case Commutes::kMultiplicative:
    case Commutes::kDivision:
      return is_additive(p) ? same : none;
    case Commutes::kIncreasing:
      return is_extreme(p) ? same : none;
    case Commutes::kDecreasing:
      return is_extreme(p) ? swapped(p) : none;
    case Commutes::kDecreasingAbove:
      return p.is_partial(ReduceOp::kMin) ? swapped(p) : none;
    default:
      return none;
  }
}

// Adds the strategies in which one operand, or both, and the result have placement p. The other operand is whole.
void add_of_two(const Placement& p, Commutes commutes, std::vector<Strategy>& strategies) {
  const bool sum = commutes == Commutes::kAdditive;
  const bool product = commutes == Commutes::kMultiplicative;
  const bool maximum = commutes == Commutes::kMaximum, minimum = commutes == Commutes::kMinimum;
  const bool monotone = maximum || minimum || commutes == Commutes::kMonotone;
  const bool first = is_additive(p) ? product || commutes == Commutes::kDivision : is_extreme(p) && (monotone || sum);
  const bool second = is_additive(p) ? product : is_extreme(p) && monotone;
  const bool both = commutes == Commutes::kCopy || (sum && is_additive(p)) ||
                    (maximum && p.is_partial(ReduceOp::kMax)) || (minimum && p.is_partial(ReduceOp::kMin));
  if (first) strategies.push_back(passing(p, 0, 2));
  if (second) strategies.push_back(passing(p, 1, 2));
  if (both) strategies.push_back({{p}, {p, p}});
}

bool gives_complex(const OpCall& call) {
  const auto is_complex = [](const auto& input) { return input.tensor->is_complex(); };
  const auto is_complex_number = [](const c10::IValue& arg) { return arg.isComplexDouble(); };
  return std::ranges::any_of(call.inputs, is_complex) || std::ranges::any_of(call.args, is_complex_number);
}

// Whether the operation may change the order of numbers, because small integers wrap around. Then the result of a
// maximum is not the maximum of the results.
bool loses_order(const OpCall& call, Commutes commutes) {
  const auto wraps = [](const auto& input) { return wraps_around(input.tensor->scalar_type()); };
  return (commutes == Commutes::kAdditive || commutes == Commutes::kNegation) &&
         std::ranges::any_of(call.inputs, wraps);
}

// dtype of the result on plain tensors.
at::ScalarType result_type(const OpCall& call) {
  if (!call.outs.empty()) return call.outs[0].tensor->scalar_type();
  at::native::ResultTypeState state = {};
  for (const auto& input : call.inputs) {
    if (input.mutated) return input.tensor->scalar_type();
    state = at::native::update_result_type_state(*input.tensor, state);
  }
  return at::native::result_type(state);
}

// Whether the operation rounds the summands of a Partial, where on plain tensors it rounds the sum.
bool rounds_shares(const OpCall& call, const Strategy& strategy) {
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    const auto& input = call.inputs[i];
    if (is_additive(strategy.inputs[i]) && std::ranges::any_of(input.placements, is_additive) &&
        rounds(input.tensor->scalar_type(), result_type(call))) {
      return true;
    }
  }
  return false;
}

}  // namespace

bool rounds(at::ScalarType from, at::ScalarType to) {
  if (!is_fraction(to)) return is_fraction(from);
  const auto part = c10::toRealValueType(from), wanted = c10::toRealValueType(to);
  const bool holds = exact_bits(wanted) >= exact_bits(part) &&
                     (!is_fraction(part) || c10::elementSize(wanted) > c10::elementSize(part));
  return part != wanted && !holds;
}

// Proposes a shard of each dim of the broadcast shape that some input or out argument shards already, and the Partial
// placements that `commutes` allows. Strategies that would round summands are removed.
void propose_pointwise(const OpCall& call, Proposal& proposal, Commutes commutes) {
  const Sizes sizes = broadcast_sizes(call);
  proposal.lies_as_pointwise = true;
  const auto ndim = static_cast<int64_t>(sizes.size());
  for (int64_t dim = 0; dim < ndim; ++dim) {
    Strategy strategy = over_dim(call, sizes, dim);
    bool wanted = false;
    for (size_t i = 0; i < call.inputs.size(); ++i) {
      const Placement& own = strategy.inputs[i];
      wanted = wanted || (own.is_shard() && is_sharded_on(call.inputs[i], own.dim));
    }
    for (const auto& out : call.outs) wanted = wanted || (out.dim() == ndim && is_sharded_on(out, dim));
    if (wanted) proposal.strategies.push_back(std::move(strategy));
  }
  const size_t count = call.inputs.size();
  for (const Placement& p : partials_among(call)) {
    if (!is_additive(p) && gives_complex(call)) {
      continue;  // complex numbers have no order, and collectives do not multiply them
    }
    if (is_extreme(p) && loses_order(call, commutes)) continue;
    if (count == 1) {
      if (const auto result = result_of_one(p, commutes)) proposal.strategies.push_back({{*result}, {p}});
    } else if (count == 2) {
      add_of_two(p, commutes, proposal.strategies);
    }
  }
  std::erase_if(proposal.strategies, [&](const Strategy& strategy) { return rounds_shares(call, strategy); });
  const size_t results = std::max<size_t>(call.op.handle.schema().returns().size(), 1);
  proposal.outputs.assign(results, OutputShape{std::vector<int64_t>(sizes.begin(), sizes.end()), {}});
}

}  // namespace tessera
