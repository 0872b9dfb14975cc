// Fuzz target: a hostile chat template. The template renders within its limits, or gives an Error.
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "tessera/base/error.h"
#include "tessera/text/chat/chat_template.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using Json = nlohmann::ordered_json;
  static const Json messages = Json::parse(
      R"([{"role": "system", "content": "s"}, {"role": "user", "content": "häl😀"},
          {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1, "y": [1.5, null]}}}]}])");
  static const Json extra =
      Json::parse(R"({"bos_token": "<s>", "tools": [{"type": "function", "function": {"name": "f"}}]})");
  const tessera::text::ChatTemplateLimits limits{.max_steps = 20'000, .max_output_bytes = 1 << 16};
  try {
    const auto chat =
        tessera::text::ChatTemplate::parse(std::string(reinterpret_cast<const char*>(data), size), "fuzz", limits);
    chat.render(messages, true, extra);
  } catch (const tessera::Error& error) {
    if (error.kind() != tessera::ErrorKind::kFormat) __builtin_trap();
  }
  return 0;
}
