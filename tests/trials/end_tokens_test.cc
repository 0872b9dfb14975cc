// Tests of the end tokens of a model whose files disagree, as in public bug reports.
#include "tessera/models/config/end_tokens.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/models/generation/generate.h"
#include "tessera/models/generation/text_stream.h"
#include "tessera/models/gguf/gguf_convert.h"
#include "tessera/text/chat/chat_prompt.h"
#include "tessera/text/chat/turn_end.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"
#include "tests/trials/chain_model.h"

namespace tessera {
namespace {

using nlohmann::json;
using testing::ChainFolder;
using testing::ChainGguf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::kChainEos;
using testing::kChainTurnEnd;
using testing::TempFolder;
using ::testing::UnorderedElementsAre;

testing::ProcessResult chat_with(const std::filesystem::path& model) {
  return testing::run_process({testing::program(), "generate", "--model", model.string(), "--chat", "--prompt", "hi",
                               "--max-new-tokens", "20", "--json"});
}

// Expects that a chat's answer is "abc", without the end token in the text.
void expect_stops(const std::filesystem::path& model, bool warns = false) {
  const auto run = chat_with(model);
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const auto object = json::parse(run.out);
  EXPECT_EQ(object["text"], "abc") << model;
  EXPECT_EQ(object["tokens"].size(), 4U) << "the end among them";
  EXPECT_EQ(run.err.find("texts end at") != std::string::npos, warns) << run.err;
}

std::optional<text::TokenId> turn_end_of(const std::string& chat, const text::Tokenizer& tokenizer) {
  return text::turn_end_token(text::ChatTemplate::parse(chat, "test"), tokenizer);
}

TEST(TurnEnd, IsTheTokenAfterTheAssistantsText) {
  TempFolder folder;
  testing::write_chain_folder(folder.path());
  const auto tokenizer = text::Tokenizer::from_folder(folder.path());
  EXPECT_EQ(turn_end_of(testing::kChainTemplate, tokenizer), kChainTurnEnd);
  EXPECT_EQ(turn_end_of("{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>{% endfor %}", tokenizer), kChainEos);
  // The token appears only after the assistant's text, after a line end, and another token follows later.
  EXPECT_EQ(turn_end_of("{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}\n<|im_end|>\n</s>"
                        "{% endif %}{% endfor %}",
                        tokenizer),
            kChainTurnEnd);
  // A template that accepts only contents in parts.
  EXPECT_EQ(turn_end_of("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}<|im_end|>{% endfor %}",
                        tokenizer),
            kChainTurnEnd);
  // GLM's form: a turn ends with the header of the next turn.
  EXPECT_EQ(turn_end_of("{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '<tool>' }}\n{{ m.content }}"
                        "{% endfor %}",
                        tokenizer),
            testing::kChainTurnStart);
  // An end that is several tokens in this vocabulary, and a template that refuses such a chat.
  EXPECT_EQ(turn_end_of("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", tokenizer), std::nullopt);
  EXPECT_EQ(turn_end_of("{{ raise_exception('no') }}", tokenizer), std::nullopt);
  EXPECT_EQ(turn_end_of("", tokenizer), std::nullopt);
}

// The vocabulary has all these tokens as special tokens. Each model has its own template.
TEST(TurnEnd, IsFoundInTheTemplatesOfKnownModels) {
  const std::vector<std::pair<std::string, std::string>> ends = {
      {"Qwen-Qwen3-0.6B", "<|im_end|>"},
      {"Qwen-Qwen2.5-7B-Instruct", "<|im_end|>"},
      {"Qwen-QwQ-32B", "<|im_end|>"},
      {"Qwen3-Coder", "<|im_end|>"},
      {"HuggingFaceTB-SmolLM3-3B", "<|im_end|>"},
      {"NousResearch-Hermes-3-Llama-3.1-8B-tool_use", "<|im_end|>"},
      {"LFM2-8B-A1B", "<|im_end|>"},
      {"Kimi-K2-Instruct", "<|im_end|>"},
      {"meta-llama-Llama-3.1-8B-Instruct", "<|eot_id|>"},
      {"meta-llama-Llama-3.2-3B-Instruct", "<|eot_id|>"},
      {"meta-llama-Llama-3.3-70B-Instruct", "<|eot_id|>"},
      {"google-gemma-2-2b-it", "<end_of_turn>"},
      {"microsoft-Phi-3.5-mini-instruct", "<|end|>"},
      {"mistralai-Mistral-Nemo-Instruct-2407", "</s>"},
      {"Mistral-Small-3.2-24B-Instruct-2506", "</s>"},
      {"deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "<\uff5cend\u2581of\u2581sentence\uff5c>"},
      {"ibm-granite-granite-3.3-2B-Instruct", "<|end_of_text|>"},
      {"GLM-4.6", "<|user|>"},
  };
  const auto change = [](nlohmann::ordered_json& tokenizer) {
    int64_t id = 261;
    for (const char* more : {"<|eot_id|>", "<end_of_turn>", "<|end|>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
                             "<|end_of_text|>", "<|user|>", "<|assistant|>", "<|start_header_id|>", "[INST]"}) {
      auto token = tokenizer["added_tokens"][0];
      token["content"] = more;
      token["id"] = id++;
      tokenizer["added_tokens"].push_back(token);
    }
  };
  for (const auto& [name, end] : ends) {
    TempFolder folder;
    const json config = {{"bos_token", "<s>"}, {"eos_token", end}};
    testing::write_chain_folder(folder.path(),
                                {.tokenizer_config = config.dump(),
                                 .change_tokenizer = change,
                                 .chat_template = read_file(testing::asset("templates") / (name + ".jinja"))});
    const auto tokenizer = text::Tokenizer::from_folder(folder.path());
    const auto chat = text::ChatTemplate::from_folder(folder.path());
    const auto found = text::turn_end_token(*chat, tokenizer);
    EXPECT_EQ(found ? tokenizer.id_to_token(*found) : "none", end) << name;
  }
}

TEST(EndTokens, ComeFromAllFilesOfTheFolder) {
  TempFolder folder;
  const auto ends_of = [&](const ChainFolder& of) {
    const auto dir = folder / "model";
    std::filesystem::remove_all(dir);
    testing::write_chain_folder(dir, of);
    return end_tokens(dir, ModelConfig::from_folder(dir));
  };
  EXPECT_THAT(ends_of({}), ElementsAre(kChainEos, kChainTurnEnd));
  EXPECT_THAT(ends_of({.generation_config = R"({"eos_token_id": [260, 258]})"}), ElementsAre(260, 258, 257));
  EXPECT_THAT(ends_of({.tokenizer_config = "{}", .generation_config = R"({"eos_token_id": 99})", .chat_template = ""}),
              ElementsAre(99));
  EXPECT_THAT(ends_of({.tokenizer_config = R"({"eos_token": "<|im_end|>"})", .config_eos = "null"}), ElementsAre(260));
  EXPECT_THAT(ends_of({.chat_template = "{% broken"}), ElementsAre(kChainEos)) << "the template is not needed here";
}

TEST(EndTokens, AreWrittenWithoutChangingOtherSettings) {
  TempFolder folder;
  const auto dir = folder / "model";
  testing::write_chain_folder(dir, {.generation_config = R"({"do_sample": true, "eos_token_id": 257, "top_k": 20})"});
  const auto config = ModelConfig::from_folder(dir);
  write_end_tokens(dir, std::vector<int64_t>{257, 260}, config);
  EXPECT_EQ(json::parse(read_file(dir / "generation_config.json")),
            json::parse(R"({"do_sample": true, "eos_token_id": [257, 260], "top_k": 20})"));
  const auto before = read_file(dir / "generation_config.json");
  write_end_tokens(dir, std::vector<int64_t>{260, 257}, config);
  EXPECT_EQ(read_file(dir / "generation_config.json"), before) << "nothing was to be changed";
  std::filesystem::remove(dir / "generation_config.json");
  write_end_tokens(dir, std::vector<int64_t>{257}, config);
  EXPECT_FALSE(std::filesystem::exists(dir / "generation_config.json")) << "config.json says so already";
  write_end_tokens(dir, std::vector<int64_t>{260}, config);
  EXPECT_EQ(json::parse(read_file(dir / "generation_config.json")), json::parse(R"({"eos_token_id": 260})"));
}

TEST(EndTokens, AChatStopsAtTheEndOfTurnOfItsTemplate) {
  TempFolder folder;
  testing::write_chain_folder(folder / "unlisted");
  expect_stops(folder / "unlisted", /*warns=*/true);
  testing::write_chain_folder(folder / "listed", {.generation_config = R"({"eos_token_id": [257, 260]})"});
  expect_stops(folder / "listed");
}

// Some converted models have such files.
TEST(EndTokens, AnEndTokenThatIsNotMarkedSpecialIsNotPartOfTheText) {
  TempFolder folder;
  const auto change = [](bool as_added) {
    return [=](nlohmann::ordered_json& tokenizer) {
      auto& token = tokenizer["added_tokens"][4];
      token["special"] = false;
      if (as_added) return;
      tokenizer["added_tokens"].erase(4);
      tokenizer["added_tokens"].erase(3);
      tokenizer["model"]["vocab"]["<|im_end|>"] = 260;
    };
  };
  for (const bool as_added : {true, false}) {
    for (const bool of_tokenizer : {true, false}) {
      if (!as_added && !of_tokenizer) continue;  // then the end is ten tokens of text, in transformers too
      SCOPED_TRACE(fmt::format("added {}, named by the tokenizer {}", as_added, of_tokenizer));
      const auto dir = folder / fmt::format("model{}{}", as_added, of_tokenizer);
      testing::write_chain_folder(dir, {.tokenizer_config = of_tokenizer ? R"({"eos_token": "<|im_end|>"})" : "{}",
                                        .generation_config = R"({"eos_token_id": [257, 260]})",
                                        .change_tokenizer = change(as_added)});
      expect_stops(dir);
      const auto tokenizer = text::Tokenizer::from_folder(dir);
      EXPECT_EQ(tokenizer.encode("a<|im_end|>"), (std::vector<text::TokenId>{'a', 260}));
      EXPECT_EQ(tokenizer.is_special(260), of_tokenizer);
    }
  }
}

TEST(EndTokens, AreNotPartOfTheTextOfAStream) {
  TempFolder folder;
  testing::write_chain_folder(folder.path());
  const auto tokenizer = text::Tokenizer::from_folder(folder.path());
  TextStream stream(tokenizer, {}, {'c'});
  EXPECT_EQ(stream.push('a') + stream.push('b') + stream.push('c') + stream.finish(), "ab");
  TextStream ignoring(tokenizer, {}, {});
  EXPECT_EQ(ignoring.push('a') + ignoring.push('c') + ignoring.finish(), "ac");
}

TEST(EndTokens, OfAGgufFileAreAlsoFoundByTheirText) {
  TempFolder folder;
  for (const int32_t type : {1, 3, 4}) {
    for (const auto eos :
         {std::optional<uint32_t>(kChainEos), std::optional<uint32_t>(kChainTurnEnd), std::optional<uint32_t>()}) {
      SCOPED_TRACE(fmt::format("type {}, eos {}", type, eos.value_or(0)));
      const auto file = folder / fmt::format("m-{}-{}.gguf", type, eos.value_or(0));
      testing::write_chain_gguf(file, {.eos = eos, .turn_end_type = type});
      gguf_to_folder(file, folder / file.stem());
      const auto tokenizer = text::Tokenizer::from_folder(folder / file.stem());
      EXPECT_EQ(tokenizer.encode("a<|im_end|>"), (std::vector<text::TokenId>{'a', 260}));
      EXPECT_TRUE(tokenizer.is_special(260));
      EXPECT_FALSE(tokenizer.is_special(259)) << "<tool> is no end";
      expect_stops(folder / file.stem());
    }
  }
  testing::write_chain_gguf(folder / "named.gguf");
  const auto run = chat_with(folder / "named.gguf");
  EXPECT_EQ(json::parse(run.out)["text"], "abc") << run.err;
  EXPECT_THAT(run.err, HasSubstr("texts end at '<|im_end|>' (260), too, which no key of the file lists"));
}

TEST(EndTokens, SurviveTwoRoundTripConversions) {
  struct Case {
    ChainFolder folder;
    std::vector<int64_t> ends;
  };
  const std::vector<Case> cases = {
      {{.generation_config = R"({"eos_token_id": [257, 260]})"}, {257, 260}},
      {{.config_eos = "[257, 260]"}, {257, 260}},
      {{.config_eos = "[260, 100]"}, {260, 100, 257}},
      {{.tokenizer_config = R"({"eos_token": "<|im_end|>"})",
        .generation_config = R"({"eos_token_id": [260, 257, 258]})"},
       {260, 257, 258}},
      {{.tokenizer_config = "{}", .generation_config = R"({"eos_token_id": [260]})"}, {260}},
  };
  for (const auto& each : cases) {
    TempFolder folder;
    testing::write_chain_folder(folder / "a", each.folder);
    folder_to_gguf(folder / "a", folder / "a.gguf", {.type = GgmlType::kF32});
    gguf_to_folder(folder / "a.gguf", folder / "b");
    folder_to_gguf(folder / "b", folder / "b.gguf", {.type = GgmlType::kF32});
    gguf_to_folder(folder / "b.gguf", folder / "c");
    for (const char* name : {"a", "b", "c"}) {
      const auto dir = folder / name;
      EXPECT_THAT(end_tokens(dir, ModelConfig::from_folder(dir)), ::testing::UnorderedElementsAreArray(each.ends))
          << name;
    }
    const auto listed = listed_end_tokens(folder / "c", ModelConfig::from_folder(folder / "c"));
    EXPECT_THAT(listed, ::testing::UnorderedElementsAreArray(each.ends)) << "for other programs";
    expect_stops(folder / "c");
  }
  // A file with its own key for the end of a turn.
  TempFolder folder;
  testing::write_chain_gguf(folder / "m.gguf", {.eos = kChainEos, .eot = 'c'});
  gguf_to_folder(folder / "m.gguf", folder / "hf");
  folder_to_gguf(folder / "hf", folder / "back.gguf");
  const auto back = GgufFile::open(folder / "back.gguf");
  EXPECT_EQ(back->find_uint("tokenizer.ggml.eos_token_id"), 257U);
  EXPECT_EQ(back->find_uint("tokenizer.ggml.eot_token_id"), static_cast<uint64_t>('c'));
  EXPECT_EQ(back->find_ints("tokenizer.ggml.token_type")->at('c'), 3) << "what ends a text is no text of it";
}

}  // namespace
}  // namespace tessera
