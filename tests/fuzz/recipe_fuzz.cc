// Fuzz target: any bytes as a recipe. The text is read, or refused with Error kConfig in one line. A recipe that is
// read is printed and reads back equal. If the first line starts with '!', it is an override.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/train/recipe/recipe.h"
#include "tessera/train/recipe/recipe_print.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string text(reinterpret_cast<const char*>(data), size);
  std::vector<std::string> overrides;
  if (text.rfind("!", 0) == 0) {
    const size_t end = text.find('\n');
    overrides.push_back(text.substr(1, end == text.npos ? end : end - 1));
    text = end == text.npos ? "" : text.substr(end + 1);
  }
  try {
    const auto recipe = tessera::train::parse_recipe(text, "fuzz.yaml", overrides);
    const std::string printed = tessera::train::to_yaml(recipe);
    if (tessera::train::to_yaml(tessera::train::parse_recipe(printed, "fuzz.yaml")) != printed) std::abort();
  } catch (const tessera::Error& error) {
    if (error.kind() != tessera::ErrorKind::kConfig) std::abort();
    if (std::string(error.what()).find('\n') != std::string::npos) std::abort();
  }
  return 0;
}
