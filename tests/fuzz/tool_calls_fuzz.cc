// Fuzz target: text of a model that has tools. The first byte gives the number of bytes in each piece of the stream.
#include <cstdint>
#include <string_view>

#include "tessera/serve/tool_calls.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const size_t piece = 1 + data[0] % 16;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  tessera::serve::ToolCallReader pieces({"f"}), whole({"f"});
  std::string cut, uncut;
  size_t calls = 0;
  const auto take = [&](const tessera::serve::ToolCallReader::ToolCallOutput& read, std::string& to) {
    to += read.text;
    calls += read.calls.size();
  };
  for (size_t at = 0; at < text.size(); at += piece) take(pieces.push(text.substr(at, piece)), cut);
  take(pieces.finish(), cut);
  const size_t found = calls;
  take(whole.push(text), uncut);
  take(whole.finish(), uncut);
  if (cut != uncut || calls != 2 * found) __builtin_trap();
  if (calls == 0 && cut != text) __builtin_trap();
  return 0;
}
