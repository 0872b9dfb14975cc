// ToolCallReader: calls of tools in the text of a message, with and without tags.
#include "tessera/serve/tool_calls.h"

#include <gtest/gtest.h>

#include <string>

namespace tessera::serve {
namespace {

// The text and the calls of a message. Text and calls must be the same for every size of the pieces in which the
// message arrives.
std::string read(const std::string& message) {
  std::string found;
  for (size_t most : {size_t{1}, size_t{3}, size_t{7}, message.size() + 1}) {
    ToolCallReader reader({"f", "g"});
    std::string text, calls;
    const auto take = [&](const ToolCallReader::ToolCallOutput& read) {
      text += read.text;
      for (const auto& call : read.calls) calls += "|" + call.name + call.arguments;
    };
    for (size_t at = 0; at < message.size(); at += most) take(reader.push(message.substr(at, most)));
    take(reader.finish());
    if (found.empty()) found = text + calls;
    EXPECT_EQ(text + calls, found) << message << " in pieces of " << most;
  }
  return found;
}

TEST(ToolCalls, ReadsCallsBetweenTags) {
  EXPECT_EQ(read(R"(<tool_call>
{"name": "f", "arguments": {"x": [1, "a"]}}
</tool_call>)"),
            R"(|f{"x":[1,"a"]})");
  EXPECT_EQ(read(R"(I look. <tool_call>{"name": "f", "arguments": {}}</tool_call>
<tool_call>{"name": "other", "arguments": "{\"b\": 2}"}</tool_call> )"),
            R"(I look.|f{}|other{"b": 2})");
  EXPECT_EQ(read(R"(<tool_call>{"name": "f"}</tool_call>done)"), "done|f{}");
  EXPECT_EQ(read(R"(<tool_call>{"name": "f", "arguments": {}})"), "|f{}") << "ended by the end of the message";
}

TEST(ToolCalls, NumbersKeepTheirDigits) {
  const std::string arguments = R"({"n":12345678901234567890123,"list":[-98765432109876543210,1e400],"x":0.5})";
  EXPECT_EQ(read("<tool_call>{\"name\": \"f\", \"arguments\": " + arguments + "}</tool_call>"), "|f" + arguments);
  EXPECT_EQ(read("[{\"name\": \"f\", \"parameters\": " + arguments + "}]"), "|f" + arguments);
}

TEST(ToolCalls, ReadsAMessageOfBareJson) {
  EXPECT_EQ(read(R"({"name": "g", "parameters": {"city": "Oslo"}})"), R"(|g{"city":"Oslo"})");
  EXPECT_EQ(read(R"( [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}])"), R"(|f{"a":1}|g{})");
  EXPECT_EQ(read(R"({"name": "Oslo", "parameters": {}})"), R"({"name": "Oslo", "parameters": {}})") << "no such tool";
  EXPECT_EQ(read("[1, 2]"), "[1, 2]");
  EXPECT_EQ(read("[]"), "[]");
  EXPECT_EQ(read("{not JSON"), "{not JSON");
}

TEST(ToolCalls, OutputThatIsNoCallIsText) {
  for (const char* text :
       {"Hello.", " \n Hello \n", "a < b", "<tool", "<tool_call", "<tool_call>never ended",
        "<tool_call>[1]</tool_call>", "<tool_call>{\"name\": 5}</tool_call> after", "well \n<tool_call>[",
        " <tool_call>1</tool_call>\n", "<tool_call>{\"name\": \"f\", \"arguments\": 5}</tool_call>",
        "x {\"name\": \"f\", \"arguments\": {}}"}) {
    EXPECT_EQ(read(text), text);
  }
}

TEST(ToolCalls, TextIsReleasedAsSoonAsItIsNoCall) {
  ToolCallReader reader({});
  EXPECT_EQ(reader.push("Hello").text, "Hello");
  EXPECT_EQ(reader.push(" <b> <").text, " <b>");
  EXPECT_EQ(reader.push("tool").text, "");
  EXPECT_EQ(reader.push("s").text, " <tools");
}

TEST(ToolCalls, ALongCallTakesLinearTime) {
  ToolCallReader reader({});
  reader.push("<tool_call>");
  for (int i = 0; i < 1'000'000; ++i) reader.push("<");
  EXPECT_EQ(reader.finish().text.size(), 1'000'011U);
}

}  // namespace
}  // namespace tessera::serve
