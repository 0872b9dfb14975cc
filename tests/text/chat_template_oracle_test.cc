// Chat templates against the apply_chat_template code of transformers at test time, with the real templates of the
// assets.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/text/json.h"
#include "tessera/text/chat/chat_template.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera::text {
namespace {

using OrderedJson = nlohmann::ordered_json;
using testing::TempFolder;
namespace fs = std::filesystem;

const char* kCases = "tests/text/oracle/chat_cases.json";

OrderedJson oracle(const TempFolder& folder, const std::vector<std::pair<std::string, fs::path>>& templates) {
  std::vector<std::string> arguments = {(folder / "out.json").string(), (testing::source_folder() / kCases).string()};
  for (const auto& [name, path] : templates) arguments.push_back(name + "=" + path.string());
  testing::ProcessOptions options;
  options.timeout_seconds = 400;
  const auto run = testing::run_python("tests/text/oracle/chat_oracle.py", arguments, options);
  EXPECT_EQ(run.exit_code, 0) << run.err;
  return OrderedJson::parse(read_file(folder / "out.json"));
}

OrderedJson ours(const ChatTemplate& chat, const OrderedJson& given, const OrderedJson& test_case, bool prompt) {
  OrderedJson extra = given.at("extra");
  if (test_case.contains("tools")) extra["tools"] = given.at("tools");
  if (test_case.contains("extra")) extra.update(test_case.at("extra"));
  try {
    const RenderedChat rendered = chat.render(test_case.at("messages"), prompt, extra);
    return OrderedJson{{"text", rendered.text}, {"spans", rendered.generation_spans}};
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kFormat);
    return OrderedJson{{"error", error.what()}};
  }
}

std::string first_difference(const std::string& theirs, const std::string& mine) {
  const auto at =
      static_cast<size_t>(std::mismatch(theirs.begin(), theirs.end(), mine.begin(), mine.end()).first - theirs.begin());
  const size_t from = at < 150 ? 0 : at - 150;
  return "\n  theirs: " + theirs.substr(from, 300) + "\n  ours:   " + mine.substr(std::min(from, mine.size()), 300);
}

// Renders every case of one template with both libraries. Returns the first difference, "" if all results are equal.
std::string difference(const std::string& source, const std::string& name, const OrderedJson& given,
                       const OrderedJson& expected, int& errors) {
  const auto cases = parse_json(read_file(testing::source_folder() / kCases), kCases, {.exact_numbers = true});
  std::optional<ChatTemplate> chat;
  try {
    chat = ChatTemplate::parse(source, name);
  } catch (const Error& error) {
    return expected.contains("syntax_error") ? "" : std::string("does not parse: ") + error.what();
  }
  if (expected.contains("syntax_error")) {
    return "parses, but Jinja2 says: " + expected["syntax_error"].get<std::string>();
  }
  for (const auto& test_case : cases) {
    for (const bool prompt : {false, true}) {
      const std::string key = test_case["name"].get<std::string>() + (prompt ? "/1" : "/0");
      const OrderedJson& theirs = expected.at(key);
      const OrderedJson mine = ours(*chat, given, test_case, prompt);
      if (theirs.contains("error") && mine.contains("error")) {
        ++errors;
        continue;
      }
      if (mine != theirs) return key + first_difference(theirs.dump(), mine.dump());
    }
  }
  return "";
}

TEST(ChatTemplateOracle, RendersTheTemplateFilesAsJinja2Does) {
  std::vector<std::pair<std::string, fs::path>> templates;
  for (const auto& entry : fs::directory_iterator(testing::asset("templates"))) {
    if (entry.path().extension() == ".jinja") templates.emplace_back(entry.path().stem().string(), entry.path());
  }
  std::ranges::sort(templates);
  ASSERT_EQ(templates.size(), 70u);
  TempFolder folder;
  const OrderedJson expected = oracle(folder, templates);
  int errors = 0;
  for (const auto& [name, path] : templates) {
    const std::string found = difference(read_file(path), name, expected.at(""), expected.at(name), errors);
    EXPECT_TRUE(found.empty()) << name << ": " << found;
  }
  EXPECT_GT(errors, 50) << "the cases should reach templates that raise";
}

// Writes the template of a tokenizer folder to a file for the oracle.
fs::path write_template(const TempFolder& folder, const std::string& name, const std::string& source) {
  std::ofstream(folder / (name + ".jinja"), std::ios::binary) << source;
  return folder / (name + ".jinja");
}

TEST(ChatTemplateOracle, RendersTheFamiliesAsApplyChatTemplateDoes) {
  TempFolder folder;
  std::vector<std::pair<std::string, fs::path>> templates;
  for (const std::string name : {"tokenizers/qwen3", "tokenizers/llama3", "tokenizers/gemma3", "smollm2"}) {
    const OrderedJson config = OrderedJson::parse(read_file(testing::asset(name) / "tokenizer_config.json"));
    const std::string stem = fs::path(name).filename().string();
    const fs::path beside = testing::asset(name) / "chat_template.jinja";
    const std::string source = fs::exists(beside) ? read_file(beside) : config.at("chat_template").get<std::string>();
    templates.emplace_back(stem, write_template(folder, stem, source));
    EXPECT_TRUE(ChatTemplate::from_folder(testing::asset(name)).has_value()) << name;
  }
  const OrderedJson expected = oracle(folder, templates);
  int errors = 0;
  for (const auto& [name, path] : templates) {
    const std::string found = difference(read_file(path), name, expected.at(""), expected.at(name), errors);
    EXPECT_TRUE(found.empty()) << name << ": " << found;
  }
}

TEST(ChatTemplateOracle, EvaluatesTheLanguageAsJinja2Does) {
  TempFolder folder;
  const fs::path snippets = testing::source_folder() / "tests/text/oracle/snippets.txt";
  const auto run =
      testing::run_python("tests/text/oracle/snippet_oracle.py", {(folder / "out.json").string(), snippets.string()});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const OrderedJson expected = OrderedJson::parse(read_file(folder / "out.json"));
  const OrderedJson messages = parse_json(
      R"([{"role": "user", "content": "hi", "nothing": null, "big": 12345678901234567890123,
           "unsigned": 18446744073709551615, "low": -98765432109876543210, "endless": 1e400, "low_endless": -1E999},
          {"role": "assistant", "content": "ho"}])",
      "snippets", {.exact_numbers = true});
  std::ifstream file(snippets);
  size_t line = 0;
  for (std::string source; std::getline(file, source); ++line) {
    std::string text, error;
    try {
      text = ChatTemplate::parse(source, "snippet").render(messages, true).text;
    } catch (const Error& raised) {
      error = raised.what();
    }
    if (expected.at(line).contains("error")) {
      EXPECT_FALSE(error.empty()) << "line " << line + 1 << ": " << source << "\n  gives '" << text
                                  << "', Jinja2 raises " << expected.at(line).at("error");
    } else {
      EXPECT_TRUE(error.empty()) << "line " << line + 1 << ": " << source << "\n  " << error;
      EXPECT_EQ(text, expected.at(line).at("text").get<std::string>()) << "line " << line + 1 << ": " << source;
    }
  }
  EXPECT_GT(line, 100u);
}

}  // namespace
}  // namespace tessera::text
