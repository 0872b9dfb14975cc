#include "tessera/optim/expert_parameters.h"

namespace tessera::optim {
namespace {

bool consume_prefix(std::string_view& remaining_name, std::string_view word) {
  if (!remaining_name.starts_with(word)) return false;
  remaining_name.remove_prefix(word.size());
  return true;
}

}  // namespace

bool is_te_expert_parameter(std::string_view name) {
  constexpr std::string_view kExperts = "mlp.experts.";
  for (size_t at = name.find(kExperts); at != std::string_view::npos; at = name.find(kExperts, at + 1)) {
    if (at > 0 && name[at - 1] != '.') continue;
    std::string_view remaining_name = name.substr(at + kExperts.size());
    if (!consume_prefix(remaining_name, "gate_up_linear.") && !consume_prefix(remaining_name, "down_linear.")) continue;
    if (!consume_prefix(remaining_name, "weight") && !consume_prefix(remaining_name, "bias")) continue;
    if (!remaining_name.empty() && remaining_name[0] >= '0' && remaining_name[0] <= '9') return true;
  }
  return false;
}

}  // namespace tessera::optim
