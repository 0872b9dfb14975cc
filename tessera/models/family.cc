#include "tessera/models/family.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/models/config.h"
#include "tessera/models/llama.h"

namespace tessera {
namespace {

template <class Matches>
const ModelFamily* first(Matches matches) {
  const auto& all = model_families();
  const auto found = std::find_if(all.begin(), all.end(), [&](const ModelFamily* family) { return matches(*family); });
  return found == all.end() ? nullptr : *found;
}

}  // namespace

const std::vector<const ModelFamily*>& model_families() {
  static const std::vector<const ModelFamily*> families = {&llama_family(), &mistral_family()};
  return families;
}

const ModelFamily* find_family(std::string_view architecture) {
  return first([&](const ModelFamily& family) { return family.architecture == architecture; });
}

const ModelFamily* find_family_of_type(std::string_view model_type) {
  return first([&](const ModelFamily& family) { return family.model_type == model_type; });
}

const ModelFamily& family_of(std::string_view architecture) {
  const auto* family = find_family(architecture);
  TESSERA_CHECK(family, ErrorKind::kFormat, "[models.make] architecture '{}' is not supported. Supported: {}.",
                architecture, fmt::join(supported_architectures(), ", "));
  return *family;
}

const ModelFamily* find_family_of_gguf(std::string_view gguf_architecture) {
  if (gguf_architecture.empty()) return nullptr;
  return first([&](const ModelFamily& family) { return family.gguf_architecture == gguf_architecture; });
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
