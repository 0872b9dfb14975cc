#include "tessera/optim/expert_parameters.h"

namespace tessera::optim {
namespace {

bool take_word(std::string_view& rest, std::string_view word) {
  if (!rest.starts_with(word)) return false;
  rest.remove_prefix(word.size());
  return true;
}

}  // namespace

bool is_te_expert_parameter(std::string_view name) {
  constexpr std::string_view kExperts = "mlp.experts.";
  for (size_t at = name.find(kExperts); at != std::string_view::npos; at = name.find(kExperts, at + 1)) {
    if (at > 0 && name[at - 1] != '.') continue;
    std::string_view rest = name.substr(at + kExperts.size());
    if (!take_word(rest, "gate_up_linear.") && !take_word(rest, "down_linear.")) continue;
    if (!take_word(rest, "weight") && !take_word(rest, "bias")) continue;
    if (!rest.empty() && rest[0] >= '0' && rest[0] <= '9') return true;
  }
  return false;
}

}  // namespace tessera::optim
