// Fuzz target: any bytes as JSON. The text is refused with a clean message of one line, or gives the same document as
// nlohmann's own parser. With exact numbers, a document that is written reads back equal.
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "tessera/base/text/json.h"
#include "tessera/base/text/json_numbers.h"
#include "tessera/base/text/quote.h"
#include "tests/fuzz/input_file.h"

namespace {

void check_exact_numbers(std::string_view text) {
  const tessera::JsonLimits limits{.max_depth = 20, .max_keys = 1000, .exact_numbers = true};
  try {
    const auto json = tessera::parse_json(text, "fuzz", limits);
    tessera::describe(json);
    if (tessera::parse_json(tessera::dump_json(json), "fuzz", limits) != json) std::abort();
  } catch (const tessera::Error& error) {
    tessera::fuzz::check_message(error.what());
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto text = tessera::fuzz::text_of(data, size);
  tessera::fuzz::check_message(tessera::quote(text));
  check_exact_numbers(text);
  try {
    const auto json = tessera::parse_json(text, "fuzz", {.max_depth = 20, .max_keys = 1000});
    if (json != nlohmann::ordered_json::parse(text)) std::abort();
    const tessera::JsonReader reader(json, "fuzz");
    if (reader.is_object()) {
      for (const auto& [key, member] : reader.members()) {
        tessera::describe(member.value());
        reader.find(key);
      }
      reader.integers("ids", 0, 100);
      reader.number("number", 1.0, 0, 1);
    }
  } catch (const tessera::Error& error) {
    tessera::fuzz::check_message(error.what());
  }
  return 0;
}
