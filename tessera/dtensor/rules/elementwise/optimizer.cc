// Sharding rules of fused optimizer steps on lists of parameters, gradients and optimizer states. The update of each
// parameter is pointwise.
#include "tessera/dtensor/rules/table.h"

namespace tessera {

namespace {

// The gradient and the optimizer states at one position of the lists get the placements of the parameter at this
// position. Step counts and scalar tensors are replicated.
void propose_fused_step(const OpCall& call, Proposal& proposal) {
  const bool scales = call.has(call.arg_named("grad_scale"));
  PlacementChoice choice;
  std::vector<Placements> parameters;
  for (const auto& input : call.inputs) {
    if (input.arg == 0) parameters.push_back(input.placements);
  }
  const int gradients = call.arg_named("grads");
  for (const auto& input : call.inputs) {
    const bool whole = input.element < 0 || input.dim() == 0;
    const Placements wanted = whole ? Placements(input.placements.size(), Replicate()) : parameters.at(input.element);
    // The schema declares gradients as written, but they are written only if grad_scale is given.
    if (input.is_written && wanted != input.placements && (input.arg != gradients || scales)) {
      refuse_in_place(call, input, wanted);
    }
    choice.inputs.push_back(wanted);
  }
  for (const auto& placements : parameters) {
    for (const auto& placement : placements) {
      if (placement.is_partial()) refuse_in_place(call, call.inputs[0], Placements(placements.size(), Replicate()));
    }
  }
  proposal.choice = std::move(choice);
}

}  // namespace

void add_optimizer_rules(RuleTable& table) {
  table.add({"aten::_fused_adamw_", "aten::_fused_adam_", "aten::_fused_sgd_", "aten::_fused_adagrad_"},
            propose_fused_step);
}

}  // namespace tessera
