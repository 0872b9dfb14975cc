#include "tessera/train/recipe/parameter_groups.h"

#include <ATen/core/Tensor.h>
#include <fmt/ranges.h>
#include <fnmatch.h>

#include <array>
#include <cmath>
#include <set>
#include <sstream>

#include "tessera/base/error.h"
#include "tessera/base/text/number.h"
#include "tessera/base/text/quote.h"

namespace tessera::train {
namespace {

double number_in(const std::string& text, const std::string& key, const std::string& value) {
  const auto out = parse_number<double>(value);
  TESSERA_CHECK(out && std::isfinite(*out) && *out >= 0, ErrorKind::kConfig,
                "[train.recipe] optimizer.groups: {}: {}: found {}, wanted a number of at least 0.", quote(text), key,
                quote(value));
  return *out;
}

std::vector<double> betas_in(const std::string& text, const std::string& value) {
  std::vector<double> out;
  std::istringstream parts(value);
  for (std::string part; std::getline(parts, part, ',');) out.push_back(number_in(text, "betas", part));
  TESSERA_CHECK(out.size() == 2 && out[0] < 1 && out[1] < 1 && !value.ends_with(','), ErrorKind::kConfig,
                "[train.recipe] optimizer.groups: {}: betas: found {}, wanted two numbers in [0, 1), as in "
                "betas=0.9,0.95.",
                quote(text), quote(value));
  return out;
}

}  // namespace

// "PATTERN KEY=VALUE ...", separated by white space. A pattern with "=" is refused, because it is probably a setting
// whose pattern was forgotten.
GroupSetting parse_group_setting(const std::string& text) {
  constexpr std::array kKeys = {"lr", "weight_decay", "betas", "eps", "momentum"};
  std::istringstream words(text);
  GroupSetting group;
  words >> group.pattern;
  std::set<std::string> seen;
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    const std::string key = word.substr(0, equals), value = equals == word.npos ? "" : word.substr(equals + 1);
    TESSERA_CHECK(std::ranges::find(kKeys, key) != kKeys.end() && seen.insert(key).second, ErrorKind::kConfig,
                  "[train.recipe] optimizer.groups: {}: found {}, wanted each of {} once at most.", quote(text),
                  quote(word), fmt::join(kKeys, ", "));
    if (key == "lr") {
      group.lr = number_in(text, key, value);
    } else if (key == "weight_decay") {
      group.weight_decay = number_in(text, key, value);
    } else if (key == "betas") {
      group.settings.emplace_back(key, betas_in(text, value));
    } else {
      const double number = number_in(text, key, value);
      const bool fits = key == "eps" ? number > 0 : number < 1;
      TESSERA_CHECK(fits, ErrorKind::kConfig, "[train.recipe] optimizer.groups: {}: {}: found {}, wanted {}.",
                    quote(text), key, number, key == "eps" ? "a number above 0" : "a number in [0, 1)");
      group.settings.emplace_back(key, number);
    }
  }
  TESSERA_CHECK(!group.pattern.empty() && group.pattern.find('=') == std::string::npos && !seen.empty(),
                ErrorKind::kConfig,
                "[train.recipe] optimizer.groups: found {}, wanted a pattern of names and settings, as in "
                "\"model.embed_tokens.* lr=1.0e-5 weight_decay=0\".",
                quote(text));
  return group;
}

std::vector<optim::ParameterGroup> parameter_groups(const std::vector<std::string>& texts, nn::Module& model, double lr,
                                                    double weight_decay, EmptyGroups empty) {
  std::vector<optim::ParameterGroup> out;
  const auto parameters = model.named_parameters();
  std::vector<bool> is_assigned(parameters.size());
  for (const auto& text : texts) {
    const auto setting = parse_group_setting(text);
    TESSERA_CHECK(!setting.lr || lr > 0, ErrorKind::kConfig,
                  "[train.recipe] optimizer.groups: {}: found an lr with optimizer.lr 0, wanted optimizer.lr above 0.",
                  quote(text));
    // One entry of the list optimizer.groups becomes up to two parameter groups, because a parameter group has one
    // weight decay: one group for the matched parameters that decay by default, and one for those that do not
    // (ParameterSlot::decay is false, as for norms and biases). The lr of a group is stored as a factor of the
    // optimizer's lr, so that both follow the schedule; this is why an entry cannot set lr when the optimizer's lr is
    // 0.
    optim::ParameterGroup decayed{.names = {},
                                  .lr_factor = setting.lr ? *setting.lr / lr : 1,
                                  .weight_decay = setting.weight_decay.value_or(weight_decay),
                                  .settings = setting.settings};
    optim::ParameterGroup undecayed = decayed;
    undecayed.weight_decay = setting.weight_decay.value_or(0);
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto& named = parameters[i];
      if (is_assigned[i] || !named.slot->parameter.requires_grad()) continue;
      if (fnmatch(setting.pattern.c_str(), named.name.c_str(), 0) != 0) continue;
      is_assigned[i] = true;
      (named.slot->decay ? decayed : undecayed).names.push_back(named.name);
    }
    const bool left_out = empty == EmptyGroups::kLeftOut;
    TESSERA_CHECK(left_out || !decayed.names.empty() || !undecayed.names.empty(), ErrorKind::kConfig,
                  "[train.recipe] optimizer.groups: {}: the pattern matches no trained parameter outside the groups "
                  "before it. An example of a parameter name is {}.",
                  quote(text), parameters.empty() ? "" : parameters.front().name);
    for (auto* group : {&decayed, &undecayed}) {
      if (!group->names.empty()) out.push_back(std::move(*group));
    }
  }
  return out;
}

}  // namespace tessera::train
