// Tests of realistic chats as training samples: which tokens count in the loss.
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/data/records/messages.h"
#include "tessera/data/records/samples.h"
#include "tests/data/byte_tokenizer.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera::data {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class ChatSamplesTest : public ::testing::Test {
 protected:
  void use_template(const std::string& source) { chat_ = text::ChatTemplate::parse(source, "test.jinja"); }
  void use_template_file(const std::string& name) {
    use_template(read_file(tessera::testing::asset("templates") / (name + ".jinja")));
  }
  // Adds special tokens to the byte tokenizer, from id 259 on.
  void add_tokens(const std::vector<std::string>& tokens, const Json& post_processor = nullptr) {
    auto file = Json::parse(read_file(folder_ / "tokenizer.json"));
    int id = kEos;
    for (const auto& token : tokens) {
      auto added = file["added_tokens"][0];
      added["id"] = ++id;
      added["content"] = token;
      file["added_tokens"].push_back(added);
    }
    file["post_processor"] = post_processor;
    std::ofstream(folder_ / "tokenizer.json") << file;
    tokenizer_ = text::Tokenizer::from_folder(folder_.path());
  }

  static TrainingRecord chat(const std::string& messages, const std::string& tools = "") {
    Json json = {{"messages", openai_messages(Json::parse(messages), "messages", "test")}};
    if (!tools.empty()) json["tools"] = Json::parse(tools);
    return {.kind = RecordKind::kChat, .json = std::make_shared<const Json>(json), .where = "test"};
  }

  std::string shown(const std::vector<int32_t>& tokens) const { return tokenizer_.decode(tokens, false); }

  // The runs of consecutive tokens that count in the loss.
  std::vector<std::string> learnt(const TrainingRecord& record, SampleOptions options = {}) {
    const SampleMaker maker(tokenizer_, chat_, std::move(options));
    const TokenizedSample sample = maker.make(record);
    warnings_ = maker.warnings();
    std::vector<std::string> runs;
    for (size_t i = 0; i < sample.tokens.size(); ++i) {
      if (!sample.loss_mask[i]) continue;
      if (i == 0 || !sample.loss_mask[i - 1]) runs.emplace_back();
      runs.back() += shown({sample.tokens[i]});
    }
    return runs;
  }

  std::vector<std::string> tokens_of(const TrainingRecord& record) {
    const SampleMaker maker(tokenizer_, chat_);
    const auto sample = maker.make(record);
    warnings_ = maker.warnings();
    std::vector<std::string> tokens;
    for (const int32_t token : sample.tokens) tokens.push_back(shown({token}));
    return tokens;
  }

  tessera::testing::TempFolder folder_;
  text::Tokenizer tokenizer_ = make_byte_tokenizer(folder_.path());
  std::optional<text::ChatTemplate> chat_;
  std::vector<std::string> warnings_;
};

// ---- Tool calls on real templates: a turn is found in the whole conversation ----

const char* kCall =
    R"("tool_calls": [{"type": "function", "id": "call12345", "function": {"name": "f", "arguments": {"x": 1}}}])";
const char* kCalled = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call><|im_end|>";

std::string user(const char* text) { return fmt::format(R"({{"role": "user", "content": "{}"}})", text); }
std::string assistant(const char* text) { return fmt::format(R"({{"role": "assistant", "content": "{}"}})", text); }
std::string tool(const char* text) {
  return fmt::format(R"({{"role": "tool", "tool_call_id": "call12345", "content": "{}"}})", text);
}
std::string call(const std::string& more = "") {
  return fmt::format(R"({{"role": "assistant", "content": "", {}{}}})", more, kCall);
}
std::string conversation(const std::vector<std::string>& messages) {
  return fmt::format("[{}]", fmt::join(messages, ", "));
}

TEST_F(ChatSamplesTest, Qwen3ToolCallsHaveLabelsInEveryPosition) {
  use_template_file("Qwen-Qwen3-0.6B");
  const std::string rains = "<think>\n\n</think>\n\nIt rains.<|im_end|>";
  EXPECT_THAT(learnt(chat(conversation({user("w?"), call(), tool("rain"), assistant("It rains.")}))),
              ElementsAre(kCalled, rains));
  EXPECT_THAT(learnt(chat(conversation({user("w?"), call(), tool("a"), call(), tool("b"), assistant("It rains."),
                                        user("?"), assistant("Yes.")}))),
              ElementsAre(kCalled, kCalled, "It rains.<|im_end|>", "<think>\n\n</think>\n\nYes.<|im_end|>"));
  const std::string two =
      R"({"role": "assistant", "content": null, "tool_calls": [{"type": "function", "function": )"
      R"({"name": "f", "arguments": "{\"x\": 1}"}}, {"type": "function", "function": {"name": "g", "arguments": ""}}]})";
  EXPECT_THAT(
      learnt(chat(conversation({user("w?"), two, tool("a"), tool("b"), assistant("It rains.")}))),
      ElementsAre("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>\n<tool_call>\n{\"name\": "
                  "\"g\", \"arguments\": {}}\n</tool_call><|im_end|>",
                  rains));
  EXPECT_THAT(learnt(chat(conversation({user("w?"), call(R"("reasoning_content": "Hm.", )"), tool("a"),
                                        assistant("Dry."), user("?"), assistant("Yes.")}))),
              ElementsAre(kCalled, "Dry.<|im_end|>", "<think>\n\n</think>\n\nYes.<|im_end|>"));
  EXPECT_THAT(
      learnt(chat(conversation({user("w?"), call(R"("reasoning_content": "Hm.", )"), tool("a"), assistant("Dry.")}))),
      ElementsAre(std::string("<think>\nHm.\n</think>\n\n") + kCalled, "<think>\n\n</think>\n\nDry.<|im_end|>"));
  EXPECT_THAT(learnt(chat(conversation({user("w?"), call()}))),
              ElementsAre(std::string("<think>\n\n</think>\n\n") + kCalled));
  EXPECT_THAT(warnings_, IsEmpty());
}

TEST_F(ChatSamplesTest, ShareGptFunctionCallsHaveLabelsWithQwen3) {
  use_template_file("Qwen-Qwen3-0.6B");
  EXPECT_THAT(
      learnt(chat(
          R"([{"from": "human", "value": "w?"}, {"from": "function_call", "value": "{\"name\": \"f\", )"
          R"(\"arguments\": {\"x\": 1}}"}, {"from": "observation", "value": "rain"}, {"from": "gpt", "value": "Wet."}])")),
      ElementsAre(kCalled, "<think>\n\n</think>\n\nWet.<|im_end|>"));
}

TEST_F(ChatSamplesTest, ToolListsAtTheLastUserMessageHaveNoLabels) {
  use_template_file("mistralai-Mistral-Nemo-Instruct-2407");
  add_tokens({"</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
              "[/TOOL_RESULTS]"});
  chat_ = text::ChatTemplate::parse(
      "{% set bos_token, eos_token = '<s>', '</s>' %}" +
          read_file(tessera::testing::asset("templates") / "mistralai-Mistral-Nemo-Instruct-2407.jinja"),
      "mistral.jinja");
  const auto record = chat(
      conversation({user("w?"), call(), tool("rain"), assistant("Wet."), user("Sure?"), assistant("Yes.")}),
      R"([{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}}])");
  EXPECT_THAT(learnt(record),
              ElementsAre("[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"x\": 1}, \"id\": \"call12345\"}]</s>",
                          "Wet.</s>", "Yes.</s>"));
}

// The template refuses the first half of the conversation. The calls must therefore be found in the text of the whole
// conversation.
TEST_F(ChatSamplesTest, TemplatesThatRequireAUserSupportCallsBeforeTheUser) {
  use_template(
      "{% set ns = namespace(user=false) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.user = true %}{% "
      "endif %}"
      "{% endfor %}{% if not ns.user %}{{ raise_exception('no user') }}{% endif %}"
      "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ "
      "c.function.name }}{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% "
      "endif %}");
  EXPECT_THAT(learnt(chat(conversation(
                  {R"({"role": "system", "content": "S"})", call(), tool("r"), user("w?"), assistant("A")}))),
              ElementsAre("<call>f<|im_end|>", "A<|im_end|>"));
}

TEST_F(ChatSamplesTest, EqualTextsOfUserToolAndAssistantAreDistinguished) {
  use_template_file("Qwen-Qwen3-0.6B");
  EXPECT_THAT(learnt(chat(conversation({user("It rains."), call(), tool("It rains."), assistant("It rains.")}))),
              ElementsAre(kCalled, "<think>\n\n</think>\n\nIt rains.<|im_end|>"));
}

// Gemma 4 prints the text of a message with calls after the results of the calls.
TEST_F(ChatSamplesTest, TextRenderedAfterToolResultsHasLabelsAndTheResultsHaveNone) {
  add_tokens({"<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|\"|>"});
  use_template_file("google-gemma-4-31B-it");
  const std::string two =
      R"({"role": "assistant", "content": "So.", "tool_calls": [{"type": "function", "id": "a", "function": {"name": "f", )"
      R"("arguments": {"x": 1}}}, {"type": "function", "id": "b", "function": {"name": "f", "arguments": {"x": 2}}}]})";
  const auto runs =
      learnt(chat(conversation({user("w?"), two, R"({"role": "tool", "tool_call_id": "a", "content": " \n"})",
                                R"({"role": "tool", "tool_call_id": "b", "content": "rain"})", assistant("Wet."),
                                user("?"), assistant("Yes.")})));
  const auto all = fmt::format("{}", fmt::join(runs, " "));
  for (const char* spoken : {"call:f{x:1}", "call:f{x:2}", "So.<turn|>", "Wet.<turn|>", "Yes.<turn|>"}) {
    EXPECT_THAT(all, HasSubstr(spoken));
  }
  EXPECT_THAT(all, ::testing::Not(HasSubstr("rain")));
}

TEST_F(ChatSamplesTest, AFirstAssistantMessageHasLabelsWithoutTheSystemPrompt) {
  use_template(
      "{% if messages %}Be kind.{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
      "{% endfor %}{% if add_generation_prompt and messages %}<|im_start|>assistant\n{% endif %}");
  EXPECT_THAT(learnt(chat(conversation({assistant("Hi"), user("a"), assistant("b")}))),
              ElementsAre("Hi<|im_end|>", "b<|im_end|>"));
}

TEST_F(ChatSamplesTest, ToolCallsThatTheTemplateDoesNotPrintAreWarnedAbout) {
  use_template(
      "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
      "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}");
  EXPECT_THAT(learnt(chat(conversation({user("w?"), call(), tool("r"), assistant("A")}))),
              ElementsAre("<|im_end|>", "A<|im_end|>"));
  EXPECT_THAT(warnings_, ElementsAre(HasSubstr("does not print tool calls")));
}

// ---- Ends of turns that the next turn's header is ----

const char* kRoleTokens =
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}";

TEST_F(ChatSamplesTest, AnEndOfTurnThatTheNextTurnPrintsHasALabel) {
  add_tokens({"<|user|>", "<|assistant|>", "<|observation|>"});
  const auto record = chat(conversation({user("a"), assistant("one"), user("b"), assistant("two")}));
  const SampleOptions ends = {.end_tokens = {259, 261}};
  use_template(kRoleTokens);
  EXPECT_THAT(learnt(record, ends), ElementsAre("one<|user|>", "two<|user|>"));
  EXPECT_THAT(warnings_, IsEmpty());
  use_template(
      "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n{% endfor %}"
      "{% if add_generation_prompt %}<|assistant|>\n{% endif %}");
  EXPECT_THAT(learnt(record, ends), ElementsAre("one\n<|user|>", "two\n<|user|>"));
  use_template(kRoleTokens);
  EXPECT_THAT(learnt(record), ElementsAre("one", "two"));
  EXPECT_THAT(warnings_, ElementsAre(HasSubstr("prints no token behind a turn of the assistant that ends it")));
}

// GLM's own template: a call ends with <|observation|>, an answer with <|user|>.
TEST_F(ChatSamplesTest, GlmTurnsEndWithTheRoleTokenOfTheNextTurn) {
  add_tokens({"<|user|>", "<|assistant|>", "<|observation|>"});
  use_template_file("GLM-4.6");
  const SampleOptions ends = {.end_tokens = {259, 261}};
  const auto runs = learnt(chat(conversation({user("w?"), call(), tool("rain"), assistant("Wet.")})), ends);
  ASSERT_EQ(runs.size(), 2u);
  EXPECT_THAT(runs[0], HasSubstr("<tool_call>f\n"));
  EXPECT_TRUE(runs[0].ends_with("</tool_call><|observation|>")) << runs[0];
  EXPECT_TRUE(runs[1].ends_with("Wet.<|user|>")) << runs[1];
  EXPECT_THAT(warnings_, IsEmpty());
}

// ---- Forms of content ----

const char* kInParts =
    R"([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, {"role": "assistant", "content": [{"type": "text", "text": "Yo"}]}])";
const char* kInTexts = R"([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}])";

TEST_F(ChatSamplesTest, TemplatesThatReadContentPartsGetParts) {
  use_template(
      "{% for m in messages %}[{{ m.role }}]{{ m.content[0].text }}{% endfor %}{% if add_generation_prompt "
      "%}[assistant]{% endif %}");
  for (const char* messages : {kInParts, kInTexts}) {
    EXPECT_EQ(fmt::format("{}", fmt::join(tokens_of(chat(messages)), "")), "[user]Hi[assistant]Yo") << messages;
    EXPECT_THAT(learnt(chat(messages)), ElementsAre("Yo")) << messages;
  }
  // The template reads only one part.
  EXPECT_EQ(
      fmt::format(
          "{}",
          fmt::join(
              tokens_of(chat(
                  R"([{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}])")),
              "")),
      "[user]Hi");
}

TEST_F(ChatSamplesTest, TemplatesThatReadTextAndPartsGetTheFormOfTheRecord) {
  use_template(
      "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}S:{{ m.content }}{% else %}{% for part in "
      "m.content %}"
      "{{ part.text | trim }}{% endfor %}{% endif %}<eos>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif "
      "%}");
  EXPECT_THAT(learnt(chat(kInTexts)), ElementsAre("S:Yo<eos>"));
  EXPECT_THAT(
      learnt(chat(
          R"([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]}])")),
      ElementsAre("ab<eos>"));
}

TEST_F(ChatSamplesTest, TemplatesThatReadTextGetTheJoinedParts) {
  use_template(
      "{% for m in messages %}[{{ m.role }}]{{ m.content + '<eos>' }}{% endfor %}{% if add_generation_prompt "
      "%}[assistant]{% endif %}");
  EXPECT_THAT(
      learnt(chat(
          R"([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]}, {"role": "assistant", "content": [{"type": "text", "text": "c"}, {"type": "text", "text": " d"}]}])")),
      ElementsAre("c d<eos>"));
}

TEST_F(ChatSamplesTest, DeveloperMessagesBecomeSystemMessagesIfTheTemplateHasNone) {
  const std::string messages = R"([{"role": "developer", "content": "D"}, {"role": "user", "content": "U"}])";
  use_template("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}");
  EXPECT_EQ(fmt::format("{}", fmt::join(tokens_of(chat(messages)), "")), "[system]D[user]U");
  use_template("{% for m in messages %}[{{ 'D' if m.role == 'developer' else m.role }}]{{ m.content }}{% endfor %}");
  EXPECT_EQ(fmt::format("{}", fmt::join(tokens_of(chat(messages)), "")), "[D]D[user]U");
}

// ---- One BOS ----

const char* kAddsBos =
    R"({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], )"
    R"("pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}], )"
    R"("special_tokens": {"<s>": {"id": "<s>", "ids": [259], "tokens": ["<s>"]}}})";

TEST_F(ChatSamplesTest, TextsThatBeginWithBosGetNoSecondBos) {
  std::ofstream(folder_ / "tokenizer_config.json") << R"({"eos_token": "<eos>", "bos_token": "<s>"})";
  add_tokens({"<s>"}, Json::parse(kAddsBos));
  const auto text = [](const char* text) { return TrainingRecord{.kind = RecordKind::kText, .text = text}; };
  EXPECT_THAT(tokens_of(text("ab")), ElementsAre("<s>", "a", "b", "<eos>"));
  EXPECT_THAT(warnings_, IsEmpty());
  EXPECT_THAT(tokens_of(text("<s>ab")), ElementsAre("<s>", "a", "b", "<eos>"));
  EXPECT_THAT(warnings_, ElementsAre(HasSubstr("BOS")));
  EXPECT_THAT(tokens_of(text("<s>")), ElementsAre("<s>", "<eos>"));
  EXPECT_THAT(tokens_of(text("<s><s>a")), ElementsAre("<s>", "<s>", "a", "<eos>"))
      << "what it spells twice it has twice";
  EXPECT_THAT(tokens_of(text("a<s>")), ElementsAre("<s>", "a", "<s>", "<eos>"));
  const auto pair = [](const char* prompt, const char* completion) {
    return TrainingRecord{.kind = RecordKind::kCompletion, .text = prompt, .completion = completion};
  };
  for (const auto& [prompt, completion] : {std::pair("a", "b"), {"<s>a", "b"}, {"a", "<s>b"}, {"<s>a", "<s>b"}}) {
    EXPECT_THAT(tokens_of(pair(prompt, completion)), ElementsAre("<s>", "a", "b", "<eos>")) << prompt << completion;
  }
  EXPECT_THAT(tokens_of(pair("", "<s>b")), ElementsAre("<s>", "b", "<eos>"));
}

TEST_F(ChatSamplesTest, TokenizersThatAddNoBosKeepTheBosOfTheText) {
  std::ofstream(folder_ / "tokenizer_config.json") << R"({"eos_token": "<eos>", "bos_token": "<s>"})";
  add_tokens({"<s>"});
  EXPECT_THAT(tokens_of({.kind = RecordKind::kText, .text = "<s><s>a"}), ElementsAre("<s>", "<s>", "a", "<eos>"));
  EXPECT_THAT(tokens_of({.kind = RecordKind::kText, .text = "<s>a"}), ElementsAre("<s>", "a", "<eos>"));
}

// ---- EOS ----

TEST_F(ChatSamplesTest, TheEosOfSpecialTokensMapEndsTexts) {
  const TrainingRecord text{.kind = RecordKind::kText, .text = "a"};
  std::ofstream(folder_ / "tokenizer_config.json") << "{}";
  add_tokens({});
  EXPECT_THAT(tokens_of(text), ElementsAre("a"));
  EXPECT_THAT(warnings_, ElementsAre(HasSubstr("names no eos_token")));
  std::ofstream(folder_ / "special_tokens_map.json")
      << R"({"eos_token": {"content": "<eos>"}, "pad_token": "<|im_end|>"})";
  add_tokens({});
  EXPECT_THAT(tokens_of(text), ElementsAre("a", "<eos>"));
  EXPECT_THAT(warnings_, IsEmpty());
  EXPECT_EQ(tokenizer_.pad_id(), kTurnEnd);
  // As in transformers, the map is used for folders without added_tokens_decoder.
  std::ofstream(folder_ / "tokenizer_config.json") << R"({"eos_token": "<|im_end|>"})";
  EXPECT_EQ(text::Tokenizer::from_folder(folder_.path()).eos_id(), kEos);
  std::ofstream(folder_ / "tokenizer_config.json") << R"({"eos_token": "<|im_end|>", "added_tokens_decoder": {}})";
  EXPECT_EQ(text::Tokenizer::from_folder(folder_.path()).eos_id(), kTurnEnd);
}

}  // namespace
}  // namespace tessera::data
