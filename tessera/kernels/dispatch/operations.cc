#include "tessera/kernels/dispatch/operations.h"

#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include "tessera/dtensor/rules/table.h"

namespace tessera::kernels {

void ensure_operations() {
  // The library is never destroyed, because the dispatcher keeps calling its kernels. `volatile` keeps the pointer in
  // memory, where the leak checker finds it.
  static auto* volatile library = [] {
    auto* made = new torch::Library(torch::Library::FRAGMENT, "tessera", std::nullopt, __FILE__, __LINE__);
    define_linear(*made);
    define_rms_norm(*made);
    define_rotary(*made);
    define_gated(*made);
    define_linear_cross_entropy(*made);
    define_causal_attention(*made);
    return made;
  }();
  (void)library;
}

torch::CppFunction no_derivative() { return torch::autograd::autogradNotImplementedFallback(); }

void add_partial_strategies(const OpCall& call, Proposal& proposal, std::initializer_list<int> inputs) {
  for (const auto& partial : partials_among(call)) {
    if (!is_additive(partial)) continue;
    Strategy strategy = replicate_rest(call, {{partial}, {}});
    for (const int input : inputs) {
      if (input < static_cast<int>(call.inputs.size())) strategy.inputs[static_cast<size_t>(input)] = partial;
    }
    proposal.strategies.push_back(std::move(strategy));
  }
}

}  // namespace tessera::kernels
