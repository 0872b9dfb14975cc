// Rules for operations that compute each element from the elements at the same index of their operands, with
// broadcasting.
#pragma once

#include "tessera/dtensor/rules/table.h"

namespace tessera {

// How an operation commutes with reductions. It decides which Partial operands give a Partial result.
enum class PartialRule {
  kNone,
  kNegation,         // f(a + b) = f(a) + f(b); max becomes min and min becomes max
  kScaling,          // f(a + b) = f(a) + f(b); max and min stay
  kAdditive,         // sum of two tensors
  kMultiplicative,   // linear in each of two tensors
  kDivision,         // linear in the first of two tensors
  kCopy,             // values are unchanged: commutes with any reduction
  kIncreasing,       // commutes with max and min
  kDecreasing,       // max becomes min and min becomes max
  kDecreasingAbove,  // decreasing on its domain x > a, which has all ranks' values if it has their minimum
  kMonotone,         // increasing in each of two tensors
  kMaximum,
  kMinimum,
};

// Whether a conversion rounds the summands of a Partial differently from the reduced value. Integer types that wrap
// around do not, since their sums wrap around, too.
bool rounds_partials(at::ScalarType from, at::ScalarType to);

void propose_pointwise(const OpCall& call, Proposal& proposal, PartialRule partial_rule);

inline Rule pointwise(PartialRule partial_rule) {
  return [partial_rule](const OpCall& call, Proposal& proposal) { propose_pointwise(call, proposal, partial_rule); };
}

// Registers the names in special_functions.cc; the other names are in pointwise_table.cc.
void add_special_function_rules(RuleTable& table);

}  // namespace tessera
