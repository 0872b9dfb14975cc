// The sharding rule of pointwise operations. pointwise_table.cc lists the operations.
#include "tessera/dtensor/rules/elementwise/pointwise.h"

#include <ATen/native/TypeProperties.h>

#include <algorithm>

#include "tessera/dtensor/random/random_fill.h"

namespace tessera {

namespace {

bool is_fraction(at::ScalarType type) { return at::isFloatingType(type) || at::isComplexType(type); }

// Returns an n for which the type represents all integers below 2^n exactly.
int exact_bits(at::ScalarType type) {
  if (at::isIntegralType(type, /*includeBool=*/false)) {
    return 8 * static_cast<int>(c10::elementSize(type)) - (at::isSignedType(type) ? 1 : 0);
  }
  return c10::elementSize(type) > 1 ? fraction_bits(type) : 1;  // 1 for booleans and 8-bit floating point
}

Placement swapped(const Placement& p) {
  return p.reduce_op == ReduceOp::kMax ? Partial(ReduceOp::kMin) : Partial(ReduceOp::kMax);
}

// Returns the placement of the result if the only operand has the Partial placement p. nullopt: the operand must be
// reduced first.
std::optional<Placement> unary_result(const Placement& p, PartialRule partial_rule) {
  const std::optional<Placement> same = p, none = std::nullopt;
  switch (partial_rule) {
    case PartialRule::kCopy:
      return same;
    case PartialRule::kNegation:
      return is_extreme(p) ? swapped(p) : is_additive(p) ? same : none;
    case PartialRule::kScaling:
      return is_extreme(p) || is_additive(p) ? same : none;
    case PartialRule::kMultiplicative:
    case PartialRule::kDivision:
      return is_additive(p) ? same : none;
    case PartialRule::kIncreasing:
      return is_extreme(p) ? same : none;
    case PartialRule::kDecreasing:
      return is_extreme(p) ? swapped(p) : none;
    case PartialRule::kDecreasingAbove:
      return p.is_partial(ReduceOp::kMin) ? swapped(p) : none;
    default:
      return none;
  }
}

// Adds the strategies in which the result and one or both operands have the Partial placement p. An operand without p
// is replicated.
void add_binary_strategies(const Placement& p, PartialRule partial_rule, std::vector<Strategy>& strategies) {
  const bool sum = partial_rule == PartialRule::kAdditive;
  const bool product = partial_rule == PartialRule::kMultiplicative;
  const bool maximum = partial_rule == PartialRule::kMaximum, minimum = partial_rule == PartialRule::kMinimum;
  const bool monotone = maximum || minimum || partial_rule == PartialRule::kMonotone;
  const bool first =
      is_additive(p) ? product || partial_rule == PartialRule::kDivision : is_extreme(p) && (monotone || sum);
  const bool second = is_additive(p) ? product : is_extreme(p) && monotone;
  const bool both = partial_rule == PartialRule::kCopy || (sum && is_additive(p)) ||
                    (maximum && p.is_partial(ReduceOp::kMax)) || (minimum && p.is_partial(ReduceOp::kMin));
  if (first) strategies.push_back(pass_through(p, 0, 2));
  if (second) strategies.push_back(pass_through(p, 1, 2));
  if (both) strategies.push_back({{p}, {p, p}});
}

bool gives_complex(const OpCall& call) {
  const auto is_complex = [](const auto& input) { return input.tensor->is_complex(); };
  const auto is_complex_number = [](const c10::IValue& arg) { return arg.isComplexDouble(); };
  return std::ranges::any_of(call.inputs, is_complex) || std::ranges::any_of(call.args, is_complex_number);
}

// Whether x <= y does not imply f(x) <= f(y) for the operation f, because its sums of small integers wrap around. Then
// f of a maximum is not the maximum of the ranks' f(x), so the operand must not stay Partial(max).
bool loses_order(const OpCall& call, PartialRule partial_rule) {
  const auto wraps = [](const auto& input) { return is_small_integer(input.tensor->scalar_type()); };
  return (partial_rule == PartialRule::kAdditive || partial_rule == PartialRule::kNegation) &&
         std::ranges::any_of(call.inputs, wraps);
}

// Returns the dtype that the result would have if the operands were plain tensors.
at::ScalarType result_type(const OpCall& call) {
  if (!call.outs.empty()) return call.outs[0].tensor->scalar_type();
  at::native::ResultTypeState state = {};
  for (const auto& input : call.inputs) {
    if (input.is_written) return input.tensor->scalar_type();
    state = at::native::update_result_type_state(*input.tensor, state);
  }
  return at::native::result_type(state);
}

// Whether with this strategy the operation would round each rank's summand of a Partial(sum) or Partial(avg) operand.
// On plain tensors the operation rounds the sum, which gives another result.
bool rounds_summands(const OpCall& call, const Strategy& strategy) {
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    const auto& input = call.inputs[i];
    if (is_additive(strategy.inputs[i]) && std::ranges::any_of(input.placements, is_additive) &&
        rounds_partials(input.tensor->scalar_type(), result_type(call))) {
      return true;
    }
  }
  return false;
}

}  // namespace

bool rounds_partials(at::ScalarType from, at::ScalarType to) {
  if (!is_fraction(to)) return is_fraction(from);
  const auto part = c10::toRealValueType(from), wanted = c10::toRealValueType(to);
  const bool holds = exact_bits(wanted) >= exact_bits(part) &&
                     (!is_fraction(part) || c10::elementSize(wanted) > c10::elementSize(part));
  return part != wanted && !holds;
}

// Proposes a shard of each dim of the broadcast shape on which some input or out= argument is sharded already, and the
// Partial placements that `partial_rule` allows. Removes strategies for which rounds_summands() is true.
void propose_pointwise(const OpCall& call, Proposal& proposal, PartialRule partial_rule) {
  const Sizes sizes = broadcast_sizes(call);
  proposal.has_pointwise_strides = true;
  const auto ndim = static_cast<int64_t>(sizes.size());
  for (int64_t dim = 0; dim < ndim; ++dim) {
    Strategy strategy = shard_broadcast_dim(call, sizes, dim);
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
    if (is_extreme(p) && loses_order(call, partial_rule)) continue;
    if (count == 1) {
      if (const auto result = unary_result(p, partial_rule)) proposal.strategies.push_back({{*result}, {p}});
    } else if (count == 2) {
      add_binary_strategies(p, partial_rule, proposal.strategies);
    }
  }
  std::erase_if(proposal.strategies, [&](const Strategy& strategy) { return rounds_summands(call, strategy); });
  const size_t results = std::max<size_t>(call.op.handle.schema().returns().size(), 1);
  proposal.outputs.assign(results, OutputShape{std::vector<int64_t>(sizes.begin(), sizes.end()), {}});
}

}  // namespace tessera
