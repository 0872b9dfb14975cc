// The tool calls in what a model writes, in the forms that chat templates teach: <tool_call>{...}</tool_call> (Hermes,
// Qwen), and a whole message that is the JSON of a call, or of a list of calls (Llama 3, Mistral).
//
//   ToolCallReader reader({"get_weather"});
//   for (const auto& piece : pieces) show(reader.push(piece));   // text that is certainly no call, and whole calls
//   show(reader.finish());
//
// What looks like a call and is none comes back as the text that it was. One thread at a time.
#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::serve {

struct ToolCall {
  std::string name;
  std::string arguments;  // the JSON of an object; numbers that 64 bits or a double do not hold keep their digits
};

class ToolCallReader {
 public:
  struct Read {
    std::string text{};
    std::vector<ToolCall> calls{};
  };
  // `names`: functions that a message of JSON alone may call; between tags any may be called.
  explicit ToolCallReader(std::set<std::string> names) : names_(std::move(names)) {}

  Read push(std::string_view text);
  Read finish();

 private:
  enum class Place { kStart, kText, kTagged, kJson };
  bool advance(Read& read);
  bool read_message(Read& read) const;

  std::set<std::string> names_;
  std::string held_, blanks_;  // what is not clear yet, and what stood before a call that is begun
  Place place_ = Place::kStart;
  size_t looked_ = 0;  // bytes of held_ in which the end of a call does not begin
  bool called_ = false;
};

}  // namespace tessera::serve
