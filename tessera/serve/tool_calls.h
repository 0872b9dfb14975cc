// Finds the tool calls in the output of a model. Two formats are read: <tool_call>{...}</tool_call> (Hermes, Qwen), and
// a whole message that is the JSON of a call or of a list of calls (Llama 3, Mistral).
//
//   ToolCallReader reader({"get_weather"});
//   for (const auto& piece : pieces) show(reader.push(piece));   // text that cannot be part of a call, and whole calls
//   show(reader.finish());
//
// Output that begins like a call but is not one is returned unchanged as text. Not thread-safe.
#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::serve {

struct ToolCall {
  std::string name;
  std::string arguments;  // the JSON of an object; numbers beyond 64 bits or a double keep all their digits
};

class ToolCallReader {
 public:
  struct ToolCallOutput {
    std::string text{};
    std::vector<ToolCall> calls{};
  };
  // `names` are the functions that a message of bare JSON may call. A call between <tool_call> and </tool_call> may
  // name any function.
  explicit ToolCallReader(std::set<std::string> names) : names_(std::move(names)) {}

  ToolCallOutput push(std::string_view text);
  ToolCallOutput finish();

 private:
  enum class ReadState { kStart, kText, kTagged, kJson };
  bool advance(ToolCallOutput& output);
  bool read_message(ToolCallOutput& output) const;

  std::set<std::string> names_;
  std::string held_, leading_whitespace_;  // output that may be part of a call; whitespace before the current call
  ReadState state_ = ReadState::kStart;
  size_t searched_bytes_ = 0;  // the closing tag does not begin in the first searched_bytes_ bytes of held_
  bool called_ = false;        // a call between tags has been read
};

}  // namespace tessera::serve
