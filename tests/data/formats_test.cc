// Tests of every example of docs/data.md: the examples are read from the page itself.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/data/rows/dataset.h"
#include "tests/data/byte_tokenizer.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera::data {
namespace {

using tessera::testing::TempFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;

const char* kToolTemplate =
    "{% if tools %}<|im_start|>system\n{{ tools[0].function.name }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ "
    "c.function.name }} {{ c.function.arguments.city }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

// The fenced blocks of docs/data.md that name a file.
std::map<std::string, std::string> examples() {
  const std::string page = read_file(tessera::testing::source_folder() / "docs" / "data.md");
  std::map<std::string, std::string> found;
  for (size_t at = page.find("\n```"); at != page.npos; at = page.find("\n```", at + 1)) {
    const size_t line = page.find('\n', at + 1), end = page.find("\n```", line);
    const std::string opening = page.substr(at + 4, line - at - 4);
    if (const size_t space = opening.find(' '); space != opening.npos) {
      found[opening.substr(space + 1)] = page.substr(line + 1, end - line);
    }
    at = end;
  }
  return found;
}

class FormatsTest : public ::testing::Test {
 protected:
  FormatsTest() {
    for (const auto& [name, content] : examples()) write(name, content);
  }

  std::string write(const std::string& name, const std::string& content) {
    std::filesystem::create_directories((folder_ / name).parent_path());
    std::ofstream(folder_ / name, std::ios::binary) << content;
    return (folder_ / name).string();
  }
  std::string write_gzip(const std::string& name, const std::string& content) {
    const auto path = (folder_ / name).string();
    const gzFile file = ::gzopen(path.c_str(), "wb");
    ::gzwrite(file, content.data(), static_cast<unsigned>(content.size()));
    ::gzclose(file);
    return path;
  }
  std::string example(const std::string& name) { return read_file(folder_ / name); }

  std::shared_ptr<const Dataset> load(DataOptions options) {
    options.shuffle = false;
    options.sequence_length = 400;
    options.packing = false;
    return Dataset::load(options, tokenizer_, chat_template_);
  }
  std::shared_ptr<const Dataset> load_file(const std::string& name) {
    return load({.sources = {(folder_ / name).string()}});
  }

  // The text of the tokens that count in the loss, with "|" after each row.
  static std::string learnt(const Dataset& set) {
    std::vector<int64_t> rows(static_cast<size_t>(set.rows()));
    std::iota(rows.begin(), rows.end(), 0);
    const Batch batch = set.rows(rows);
    const auto* labels = batch.labels.const_data_ptr<int64_t>();
    std::string text;
    for (int64_t i = 0; i < batch.labels.numel(); ++i) {
      if (labels[i] == kTurnEnd) text += "<e>";
      if (labels[i] == kEos) text += "<eos>";
      if (labels[i] >= 0 && labels[i] < 256) text += static_cast<char>(labels[i]);
      if ((i + 1) % batch.labels.size(1) == 0) text += "|";
    }
    return text;
  }

  std::string error_of(DataOptions options, ErrorKind kind) {
    try {
      load(std::move(options));
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), kind) << error.what();
      EXPECT_THAT(error.what(), ::testing::Not(HasSubstr("\n")));
      return error.what();
    }
    ADD_FAILURE() << "no error";
    return "";
  }

  TempFolder folder_;
  text::Tokenizer tokenizer_ = make_byte_tokenizer(folder_.path());
  std::optional<text::ChatTemplate> chat_template_ = text::ChatTemplate::parse(kToolTemplate, "test.jinja");
};

TEST_F(FormatsTest, EveryDocumentedExampleHasTheExpectedLabels) {
  const std::map<std::string, std::string> wanted = {
      {"messages.jsonl", "Red.<e>|Four.<e>|"},
      {"sharegpt.jsonl", "Red.<e>|Four.<e>|"},
      {"alpaca.json", "Red.<e>|Four.<e>|"},
      {"turns.jsonl", "Red.<e>|Four.<e>|"},
      {"tools.jsonl", "<call>weather Oslo</call><e>It rains.<e>|"},
      {"completions.jsonl", " four.<eos>|"},
      {"texts.jsonl", "n the beginning.<eos>|"},
      {"verses.txt",
       "n the beginning God created the heaven and the earth.\nAnd the earth was without form, and void.\n<eos>|"}};
  auto found = examples();
  for (const auto& [name, text] : wanted) {
    EXPECT_EQ(found.erase(name), 1u) << name << " is not in docs/data.md";
    EXPECT_EQ(learnt(*load_file(name)), text) << name;
  }
  EXPECT_EQ(found.erase("pairs.jsonl"), 1u);
  EXPECT_TRUE(found.empty()) << found.begin()->first << " of docs/data.md is no test";
}

TEST_F(FormatsTest, TheSameDataInEveryFormatGivesTheSameTokens) {
  write("array.json", "[" + example("messages.jsonl").replace(example("messages.jsonl").find('\n'), 1, ",") + "]");
  write_gzip("messages.jsonl.gz", example("messages.jsonl"));
  write_gzip("alpaca.json.gz", example("alpaca.json"));
  const auto fingerprint = load_file("messages.jsonl")->fingerprint();
  for (const char* name :
       {"sharegpt.jsonl", "alpaca.json", "turns.jsonl", "array.json", "messages.jsonl.gz", "alpaca.json.gz"}) {
    EXPECT_EQ(load_file(name)->fingerprint(), fingerprint) << name;
  }
}

TEST_F(FormatsTest, TrainOnInputsLabelsEveryToken) {
  const auto set = load({.sources = {(folder_ / "completions.jsonl").string()}, .train_on_inputs = true});
  EXPECT_EQ(learnt(*set), "wice two is four.<eos>|");
}

TEST_F(FormatsTest, AlpacaWithoutAChatTemplateUsesTheAlpacaPrompt) {
  chat_template_.reset();
  const auto set = load({.sources = {(folder_ / "alpaca.json").string()}, .train_on_inputs = true});
  const auto text = learnt(*set);
  EXPECT_THAT(text,
              HasSubstr("elow is an instruction that describes a task, paired with an input that provides further "
                        "context. Write a response that appropriately completes the request.\n\n### "
                        "Instruction:\nName a colour.\n\n### Input:\nA warm one.\n\n### Response:\nRed.<eos>|"));
  EXPECT_THAT(text, HasSubstr("elow is an instruction that describes a task. Write a response that appropriately "
                              "completes the request.\n\n### Instruction:\nTwice two?\n\n### Response:\nFour.<eos>|"));
}

// The names of the columns are LLaMA-Factory's.
TEST_F(FormatsTest, SystemAndHistoryOfAlpacaComeBeforeTheInstruction) {
  const auto path =
      write("history.jsonl", R"({"instruction": "Q", "input": "I", "output": "A", "system": "Be brief.", )"
                             R"("history": [["R", "B"], ["S", "C"]]})"
                             "\n"
                             R"({"instruction": "Q", "output": "A", "system": "", "history": []})"
                             "\n");
  const std::string both =
      "system\nBe brief.<e>\nuser\nR<e>\nassistant\nB<e>\nuser\nS<e>\nassistant\nC<e>\nuser\nQ\n\nI<e>\nassistant\n"
      "A<e>\n|user\nQ<e>\nassistant\nA<e>\n|";
  EXPECT_EQ(learnt(*load({.sources = {path}, .train_on_inputs = true})), both);
  EXPECT_EQ(learnt(*load({.sources = {path}})), "B<e>C<e>A<e>|A<e>|");
  const auto renamed = write("renamed.jsonl", R"({"instruction": "Q", "output": "A", "past": [["R", "B"]]})");
  EXPECT_EQ(learnt(*load({.sources = {renamed}, .columns = {{"history", "past"}, {"system", "s"}}})), "B<e>A<e>|");
  for (const char* wrong : {R"("R")", R"([["R"]])", R"([["R", null]])", R"([{"user": "R"}])"}) {
    const auto broken =
        write("broken.jsonl", R"({"instruction": "Q", "output": "A", "history": )" + std::string(wrong) + "}");
    EXPECT_THAT(error_of({.sources = {broken}}, ErrorKind::kFormat),
                AllOf(HasSubstr("broken.jsonl line 1"), HasSubstr("'history' is"), HasSubstr("[user, assistant]")));
  }
  chat_template_.reset();
  EXPECT_THAT(learnt(*load({.sources = {path}, .train_on_inputs = true})),
              HasSubstr("e brief.\n\n### Instruction:\nR\n\n### Response:\nB\n\n### Instruction:\nS\n\n### "
                        "Response:\nC\n\n### Instruction:\nQ\n\n### Input:\nI\n\n### Response:\nA<eos>|"));
}

TEST_F(FormatsTest, PreferencePairsAreRecognisedAndRefused) {
  const auto path = (folder_ / "pairs.jsonl").string();
  const auto message = error_of({.sources = {path}}, ErrorKind::kConfig);
  EXPECT_THAT(message, AllOf(HasSubstr("pairs.jsonl line 1"), HasSubstr("preference pair"),
                             HasSubstr("data.columns=[completion=chosen]")));
  EXPECT_EQ(learnt(*load({.sources = {path}, .columns = {{"completion", "chosen"}}})), " four.<eos>|");
  const auto broken = write("broken.jsonl", R"({"chosen": "a", "rejected": [{"role": "user", "content": "b"}]})");
  EXPECT_THAT(error_of({.sources = {broken}}, ErrorKind::kFormat), HasSubstr("one is text, the other a list"));
}

TEST_F(FormatsTest, ColumnsAreRenamed) {
  const auto path = write("renamed.jsonl", R"({"text": "a title", "dialogue": [{"role": "user", "content": "Q"}, )"
                                           R"({"role": "assistant", "content": "A"}]})");
  EXPECT_EQ(learnt(*load({.sources = {path}, .columns = {{"messages", "dialogue"}}})), "A<e>|");
  EXPECT_EQ(learnt(*load({.sources = {path}})), " title<eos>|");
  EXPECT_THAT(error_of({.sources = {path}, .columns = {{"messages", "dialog"}}}, ErrorKind::kFormat),
              AllOf(HasSubstr("no column 'dialog'"), HasSubstr("'dialogue'")));
}

TEST_F(FormatsTest, RenamedOptionalColumnsMayBeAbsent) {
  const auto path = write(
      "asked.jsonl", "{\"ask\": \"Q\", \"with\": \"I\", \"answer\": \"A\"}\n{\"ask\": \"Q\", \"answer\": \"A\"}\n");
  const auto set = load({.sources = {path},
                         .columns = {{"instruction", "ask"}, {"input", "with"}, {"output", "answer"}},
                         .train_on_inputs = true});
  EXPECT_EQ(learnt(*set), "user\nQ\n\nI<e>\nassistant\nA<e>\n|user\nQ<e>\nassistant\nA<e>\n|");
}

TEST_F(FormatsTest, MessagesOfWeightZeroHaveNoLabels) {
  const auto path = write("weights.jsonl",
                          R"({"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A", )"
                          R"("weight": 0}, {"role": "user", "content": "R"}, {"role": "assistant", "content": "B"}]})");
  EXPECT_EQ(learnt(*load({.sources = {path}})), "B<e>|");
  chat_template_ = text::ChatTemplate::parse(
      "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}!{% endgeneration %}{% else "
      "%}{{ m.content }}{% endif %}{% endfor %}",
      "marked.jinja");
  EXPECT_EQ(learnt(*load({.sources = {path}})), "B!|");
}

// A run that resumes on another day or on another host must read the same rows.
TEST_F(FormatsTest, TemplatesSeeAConstantDate) {
  chat_template_ = text::ChatTemplate::parse(
      "{{ strftime_now('%A %d %b %Y %H') }}{% for m in messages %}|{{ m.content }}<|im_end|>{% endfor %}",
      "dated.jinja");
  EXPECT_EQ(learnt(*load({.sources = {(folder_ / "turns.jsonl").string()}, .train_on_inputs = true})).substr(0, 21),
            "riday 26 Jul 2024 12|");
}

TEST_F(FormatsTest, ContentMayBeAListOfPartsOrMissingWithToolCalls) {
  const std::string call =
      R"("tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Oslo\"}"}}]})";
  const std::string rest = R"(, {"role": "tool", "content": "rain"}, {"role": "assistant", "content": "Rain."}]})";
  const std::string question =
      R"({"messages": [{"role": "user", "content": [{"type": "text", "text": "Wea"}, {"type": "text", "text": "ther?"}]}, )";
  for (const std::string content : {R"("content": null, )", "", R"("content": "", )"}) {
    const auto path = write("calls.jsonl", question + R"({"role": "assistant", )" + content + call + rest);
    EXPECT_EQ(learnt(*load({.sources = {path}})), "<call>weather Oslo</call><e>Rain.<e>|") << content;
    EXPECT_THAT(learnt(*load({.sources = {path}, .train_on_inputs = true})), HasSubstr("user\nWeather?<e>"));
  }
  const auto refused = [&](const std::string& message) {
    const auto path = write("refused.jsonl", R"({"messages": [{"role": "user", "content": "Q"}, )" + message + "]}");
    return error_of({.sources = {path}}, ErrorKind::kFormat);
  };
  const char* where = "refused.jsonl line 1: message 1 of 'messages'";
  EXPECT_THAT(refused(R"({"role": "assistant"})"), AllOf(HasSubstr(where), HasSubstr("'content' is missing")));
  EXPECT_THAT(refused(R"({"role": "assistant", "content": null})"), HasSubstr("'content' is missing"));
  EXPECT_THAT(refused(R"({"role": "assistant", "content": 5})"), AllOf(HasSubstr(where), HasSubstr("is 5")));
  EXPECT_THAT(refused(R"({"role": "user", "content": [{"type": "image_url", "image_url": {}}]})"),
              AllOf(HasSubstr(where), HasSubstr("of type 'image_url'")));
  EXPECT_THAT(refused(R"({"role": "user", "content": ["a"]})"), HasSubstr("a part of its content is \"a\""));
}

TEST_F(FormatsTest, ShareGptSupportsToolsAndSystemPromptsAndRefusesOtherRoles) {
  const auto path =
      write("functions.jsonl",
            R"({"system": "Be brief.", "conversations": [{"from": "human", "value": "Weather?"}, {"from": )"
            R"("function_call", "value": "{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}"}, {"from": )"
            R"("observation", "value": "rain"}, {"from": "gpt", "value": "Rain."}]})");
  EXPECT_EQ(learnt(*load({.sources = {path}})), "<call>weather Oslo</call><e>Rain.<e>|");
  EXPECT_THAT(learnt(*load({.sources = {path}, .train_on_inputs = true})), HasSubstr("system\nBe brief.<e>"));
  const auto other = write("other.jsonl", R"({"conversations": [{"from": "narrator", "value": "Q"}]})");
  EXPECT_THAT(error_of({.sources = {other}}, ErrorKind::kFormat),
              AllOf(HasSubstr("other.jsonl line 1: message 0 of 'conversations' is from 'narrator'")));
  const auto call =
      write("call.jsonl", "{\"conversations\": [{\"from\": \"function_call\", \"value\": \"weather()\"}]}");
  EXPECT_THAT(
      error_of({.sources = {call}}, ErrorKind::kFormat),
      AllOf(HasSubstr("call.jsonl line 1: message 0"), HasSubstr("the function call"), HasSubstr("no valid JSON")));
}

TEST_F(FormatsTest, MixedKindsOfRecordsInAFileAreRefused) {
  const auto path = write("mixed.jsonl", "{\"text\": \"ab\"}\n{\"prompt\": \"a\", \"completion\": \"b\"}\n");
  EXPECT_THAT(error_of({.sources = {path}}, ErrorKind::kFormat),
              AllOf(HasSubstr("mixed.jsonl line 2: found the keys 'prompt', 'completion'"), HasSubstr("are texts"),
                    HasSubstr("unless data.format is jsonl")));
  EXPECT_EQ(learnt(*load({.sources = {path}, .format = "jsonl"})), "b<eos>|b<eos>|");
  EXPECT_THAT(error_of({.sources = {path}, .format = "alpaca"}, ErrorKind::kFormat),
              AllOf(HasSubstr("line 1"), HasSubstr("wanted 'instruction' and 'output'")));
}

}  // namespace
}  // namespace tessera::data
