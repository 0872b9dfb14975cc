// Tests that large numbers in tools and tool calls of records are rendered digit by digit.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tessera/data/records/messages.h"
#include "tessera/data/records/row_source.h"
#include "tessera/text/chat/chat_template.h"
#include "tests/support/temp_folder.h"

namespace tessera::data {
namespace {

TEST(ExactNumbers, ToolsAndToolCallsKeepAllDigits) {
  const std::string line =
      R"({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [)"
      R"({"function": {"name": "f", "arguments": {"n": 12345678901234567890123}}},)"
      R"({"function": {"name": "g", "arguments": "{\"n\": [-98765432109876543210]}"}}]}],)"
      R"("tools": [{"function": {"name": "f", "parameters": {"maximum": 100000000000000000000}}}]})";
  const auto chat = text::ChatTemplate::parse(
      "{% for c in messages[1].tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{{ tools | tojson }}", "t");
  testing::TempFolder folder;
  for (const char* name : {"rows.jsonl", "rows.json"}) {
    const bool array = std::string(name) == "rows.json";
    std::ofstream(folder / name) << (array ? "[" + line + "]" : line + "\n");
    const auto source = open_rows(folder / name, array ? DataContainer::kJsonArray : DataContainer::kJsonLines);
    RecordRow row;
    ASSERT_TRUE(source->next(row));
    Json extra = Json::object();
    add_tools(row.value, extra, row.where);
    EXPECT_EQ(chat.render(openai_messages(row.value["messages"], "messages", row.where), false, extra).text,
              R"({"n": 12345678901234567890123}{"n": [-98765432109876543210]})"
              R"([{"function": {"name": "f", "parameters": {"maximum": 100000000000000000000}}}])")
        << name;
  }
}

}  // namespace
}  // namespace tessera::data
