// Sharding rules of matrix products, derived from einsum equations.
#include <string_view>

#include "tessera/dtensor/rules/table.h"

namespace tessera {

namespace {

std::vector<std::string_view> operands_of(std::string_view equation) {
  std::vector<std::string_view> operands;
  while (!equation.empty()) {
    const size_t comma = equation.find(',');
    operands.push_back(equation.substr(0, comma));
    equation = comma == std::string_view::npos ? std::string_view() : equation.substr(comma + 1);
  }
  return operands;
}

// Returns the placement of an operand if the dims with the einsum label `label` are sharded: a shard of the operand's
// dim with this label, or Replicate if the operand lacks the label.
Placement at_label(std::string_view operand, char label) {
  const size_t at = operand.find(label);
  return at == std::string_view::npos ? Replicate() : Shard(static_cast<int64_t>(at));
}

// Returns the strategies of an einsum equation: one for each label, in which the dims with this label are sharded. If
// the output has the label, the output is sharded, too; otherwise the label is summed over and the output is Partial.
// Because the product is linear in each operand, there is also a strategy in which one operand is Partial and so is the
// output.
std::vector<Strategy> einsum_strategies(const OpCall& call, std::string_view equation) {
  const size_t arrow = equation.find("->");
  const auto operands = operands_of(equation.substr(0, arrow));
  const std::string_view result = equation.substr(arrow + 2);
  std::string summed;
  for (const auto& operand : operands) {
    for (const char label : operand) {
      if (result.find(label) == std::string_view::npos && summed.find(label) == std::string::npos) summed += label;
    }
  }
  std::vector<Strategy> strategies;
  const auto add = [&](char label, const Placement& output) {
    Strategy strategy{{output}, {}};
    for (const auto& operand : operands) strategy.inputs.push_back(at_label(operand, label));
    strategies.push_back(std::move(strategy));
  };
  for (const char label : result) add(label, at_label(result, label));
  for (const char label : summed) add(label, Partial());
  for (const Placement& p : partials_among(call)) {
    if (!is_additive(p)) continue;
    for (size_t i = 0; i < operands.size(); ++i) strategies.push_back(pass_through(p, i, operands.size()));
  }
  return strategies;
}

// Returns the sizes of the output. The size of each label is read from an operand with this label. The equation's
// operand i is call.inputs[first + i].
std::vector<int64_t> result_sizes(const OpCall& call, std::string_view equation, size_t first) {
  const size_t arrow = equation.find("->");
  const auto operands = operands_of(equation.substr(0, arrow));
  std::vector<int64_t> sizes;
  for (const char label : equation.substr(arrow + 2)) {
    for (size_t i = 0; i < operands.size(); ++i) {
      const size_t at = operands[i].find(label);
      if (at != std::string_view::npos && at < call.inputs[first + i].sizes.size()) {
        sizes.push_back(call.inputs[first + i].sizes[at]);
        break;
      }
    }
  }
  return sizes;
}

Rule einsum(const char* equation) {
  return [equation](const OpCall& call, Proposal& proposal) {
    proposal.strategies = einsum_strategies(call, equation);
    proposal.output(result_sizes(call, equation, 0));
  };
}

// addmm(self, a, b) and similar: self has the placement of the output, also if the output is Partial. If the output is
// sharded along a dim in which self broadcasts, self is replicated.
Rule einsum_plus(const char* equation) {
  return [equation](const OpCall& call, Proposal& proposal) {
    const auto sizes = result_sizes(call, equation, 1);
    const TensorInput& self = call.inputs[0];
    proposal.strategies = einsum_strategies(call, equation);
    for (auto& strategy : proposal.strategies) {
      Placement placement = strategy.outputs[0];
      if (placement.is_shard()) {
        const int64_t own = operand_dim(self, sizes, placement.dim);
        placement = own < 0 ? Replicate() : Shard(own);
      }
      strategy.inputs.insert(strategy.inputs.begin(), placement);
    }
    proposal.output(sizes);
  };
}

}  // namespace

void add_matmul_rules(RuleTable& table) {
  table.add("aten::mm", einsum("mk,kn->mn"));
  table.add("aten::bmm", einsum("bmk,bkn->bmn"));
  table.add("aten::mv", einsum("mk,k->m"));
  table.add({"aten::dot", "aten::vdot"}, [product = einsum("k,k->")](const OpCall& call, Proposal& proposal) {
    product(call, proposal);
    proposal.allows_new_shards = true;
  });
  table.add("aten::addmm", einsum_plus("mk,kn->mn"));
  table.add("aten::addmv", einsum_plus("mk,k->m"));
  table.add("aten::addr", einsum_plus("m,n->mn"));
  table.add("aten::baddbmm", einsum_plus("bmk,bkn->bmn"));
  table.add("aten::addbmm", einsum_plus("bmk,bkn->mn"));
}

}  // namespace tessera
