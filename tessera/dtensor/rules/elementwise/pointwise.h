// Operations that compute each element from the elements at the same place of their operands, with broadcasting.
#pragma once

#include "tessera/dtensor/rules/table.h"

namespace tessera {

// With which reductions an operation commutes, so that partial operands give a partial result.
enum class Commutes {
  kNone,
  kNegation,         // f(a + b) = f(a) + f(b), and max becomes min
  kScaling,          // f(a + b) = f(a) + f(b), and order is kept
  kAdditive,         // of two tensors
  kMultiplicative,   // linear in each of two tensors
  kDivision,         // linear in the first of two
  kCopy,             // values pass unchanged: any reduction
  kIncreasing,       // commutes with max and min
  kDecreasing,       // swaps them
  kDecreasingAbove,  // decreasing where it is defined, which a minimum's parts do not leave
  kMonotone,         // increasing in each of two tensors
  kMaximum,
  kMinimum,
};

// Whether a conversion rounds numbers, parts of a sum among them. Integers that wrap around do so in their sum, too.
bool rounds(at::ScalarType from, at::ScalarType to);

void propose_pointwise(const OpCall& call, Proposal& proposal, Commutes commutes);

inline Rule pointwise(Commutes commutes) {
  return [commutes](const OpCall& call, Proposal& proposal) { propose_pointwise(call, proposal, commutes); };
}

// The names: pointwise_table.cc, special_functions.cc.
void add_special_function_rules(RuleTable& table);

}  // namespace tessera
