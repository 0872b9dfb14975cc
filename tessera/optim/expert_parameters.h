// Parameters by the names of Transformer Engine's grouped linears: each rank has its own experts under the names that
// the others use, so that only the name tells. NeMo AutoModel's _TE_EXPERT_PARAM_PATTERN (up to 0.5); modules that are
// our own say it by nn::GradientMarks::ep_local_experts instead.
//
//   is_te_expert_parameter("model.layers.0.mlp.experts.down_linear.weight3");      // true
//
// Pure. No communication.
#pragma once

#include <string_view>

namespace tessera::optim {

// As a search of this regular expression does, with ASCII digits.
inline constexpr std::string_view kTeExpertParamPattern =
    R"((?:^|\.)mlp\.experts\.(?:gate_up_linear|down_linear)\.(?:weight|bias)\d+)";
bool is_te_expert_parameter(std::string_view name);

}  // namespace tessera::optim
