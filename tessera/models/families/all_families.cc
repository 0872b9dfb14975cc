#include <fmt/ranges.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/models/config/config.h"
#include "tessera/models/config/family.h"
#include "tessera/models/families/families.h"
#include "tessera/models/families/gemma3.h"

namespace tessera {
namespace {

// The base_model_prefix of every class in transformers. A file of the model without head leaves this prefix out.
constexpr std::string_view kBasePrefix = "model.";

template <class Matches>
const ModelFamily* first_family(Matches matches) {
  const auto& all = model_families();
  const auto found = std::ranges::find_if(all, [&](const ModelFamily* family) { return matches(*family); });
  return found == all.end() ? nullptr : *found;
}

}  // namespace

std::vector<std::string> WeightMap::names_of(const std::string& parameter) const {
  // Loading uses the first of the returned names for which the folder has a tensor, and saving uses the first returned
  // name by default. So the order is: names with the family's prefixes in files (WeightMap::prefixes), the model's own
  // name, the name without the prefix "model.".
  std::vector<std::string> names;
  for (const auto& [ours, theirs] : prefixes) {
    if (parameter.starts_with(ours)) names.push_back(std::string(theirs) + parameter.substr(ours.size()));
  }
  names.push_back(parameter);
  if (parameter.starts_with(kBasePrefix)) names.push_back(parameter.substr(kBasePrefix.size()));
  return names;
}

bool WeightMap::is_unowned(std::string_view name) const {
  return std::ranges::any_of(unowned_prefixes, [&](std::string_view begin) { return name.starts_with(begin); });
}

const std::vector<const ModelFamily*>& model_families() {
  static const std::vector<const ModelFamily*> families = {
      &llama_family(),  &mistral_family(),           &qwen2_family(), &qwen3_family(), &qwen3_moe_family(),
      &gemma3_family(), &gemma3_conditional_family()};
  return families;
}

const ModelFamily* find_family(std::string_view architecture) {
  return first_family([&](const ModelFamily& family) { return family.architecture == architecture; });
}

const ModelFamily* find_family_of_type(std::string_view model_type) {
  return first_family([&](const ModelFamily& family) { return family.model_type == model_type; });
}

const ModelFamily& family_of(std::string_view architecture) {
  const auto* family = find_family(architecture);
  TESSERA_CHECK(family, ErrorKind::kFormat, "[models.make] architecture '{}' is not supported. Supported: {}.",
                architecture, fmt::join(supported_architectures(), ", "));
  return *family;
}

const ModelFamily* find_family_of_gguf(std::string_view gguf_architecture) {
  if (gguf_architecture.empty()) return nullptr;
  return first_family([&](const ModelFamily& family) { return family.gguf.architecture == gguf_architecture; });
}

const std::vector<std::string>& supported_architectures() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const auto* family : model_families()) all.emplace_back(family->architecture);
    return all;
  }();
  return names;
}

}  // namespace tessera
