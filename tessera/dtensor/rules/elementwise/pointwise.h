// Rules for operations that compute each element from the elements at the same index of their operands, with
// broadcasting.
#pragma once

#include "tessera/dtensor/rules/table.h"

namespace tessera {

// With which reductions an operation f commutes: reducing f(x) over the ranks equals f of the reduced x. Operands that
// are Partial with such a reduction give a Partial result and need not be reduced.
enum class PartialRule {
  kNone,
  kNegation,         // f(a + b) = f(a) + f(b); max becomes min and min becomes max
  kScaling,          // f(a + b) = f(a) + f(b); max and min stay
  kAdditive,         // sum of two tensors
  kMultiplicative,   // linear in each of two tensors
  kDivision,         // linear in the first of two tensors
  kCopy,             // values are unchanged: commutes with any reduction
  kIncreasing,       // monotonically increasing: commutes with max and min
  kDecreasing,       // monotonically decreasing: max becomes min and min becomes max
  kDecreasingAbove,  // decreasing on its domain x > a, which contains all ranks' values if it contains their minimum
  kMonotone,         // increasing in each of two tensors
  kMaximum,
  kMinimum,
};

// Whether converting each rank's summand of a Partial(sum) and then reducing gives another value than converting the
// sum, because the conversion rounds. False between integer types, whose conversions and sums wrap around in the same
// way.
bool rounds_partials(at::ScalarType from, at::ScalarType to);

void propose_pointwise(const OpCall& call, Proposal& proposal, PartialRule partial_rule);

inline Rule pointwise(PartialRule partial_rule) {
  return [partial_rule](const OpCall& call, Proposal& proposal) { propose_pointwise(call, proposal, partial_rule); };
}

// Adds the rules of special_functions.cc; pointwise_table.cc adds those of the other pointwise operations.
void add_special_function_rules(RuleTable& table);

}  // namespace tessera
