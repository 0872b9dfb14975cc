// Finds experts by the parameter names of Transformer Engine's grouped linears: each rank stores its own experts under
// the same names as the other ranks, so only the name identifies them. This is NeMo AutoModel's
// _TE_EXPERT_PARAM_PATTERN (in its versions up to 0.5). Tessera's own modules are marked with
// nn::GradientMarks::ep_local_experts instead.
//
//   is_te_expert_parameter("model.layers.0.mlp.experts.down_linear.weight3");      // true
//
// A pure function. No communication.
#pragma once

#include <string_view>

namespace tessera::optim {

// is_te_expert_parameter() returns whether `name` contains a match of this regular expression. Digits are ASCII digits.
inline constexpr std::string_view kTeExpertParamPattern =
    R"((?:^|\.)mlp\.experts\.(?:gate_up_linear|down_linear)\.(?:weight|bias)\d+)";
bool is_te_expert_parameter(std::string_view name);

}  // namespace tessera::optim
