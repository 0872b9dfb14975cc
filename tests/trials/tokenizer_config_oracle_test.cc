// Tests of random spellings of tokenizer_config.json and added tokens against transformers' AutoTokenizer.
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <sstream>

#include "tessera/text/tokenizer.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"
#include "tests/trials/chain_model.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;
using testing::TempFolder;

// The environment variable TESSERA_SEED repeats a run.
uint64_t drawn_seed() {
  const char* given = std::getenv("TESSERA_SEED");
  return given ? std::strtoull(given, nullptr, 10) : std::random_device{}();
}

struct TokenizerFiles {
  Json tokenizer, config;
};

class DrawnFiles {
 public:
  explicit DrawnFiles(uint64_t seed) : random_(seed) {}

  TokenizerFiles draw() {
    TokenizerFiles files{testing::chain_tokenizer(), Json::object()};
    auto& added = files.tokenizer["added_tokens"];
    for (auto& token : added) {
      if (one_in(3)) token["special"] = !token["special"].get<bool>();
      if (one_in(6)) token["normalized"] = true;
      if (one_in(8)) token["lstrip"] = true;
      if (one_in(8)) token["rstrip"] = true;
    }
    if (one_in(3)) {  // as for Gemma, also in the vocabulary; the last ones only there
      for (const auto& token : added) {
        files.tokenizer["model"]["vocab"][token["content"].get<std::string>()] = token["id"];
      }
      added.erase(4);
      if (one_in(2)) added.erase(3);
    }
    if (one_in(2)) files.tokenizer["post_processor"] = template_around();
    auto& config = files.config;
    config["tokenizer_class"] = one_in(2) ? "PreTrainedTokenizerFast" : "TokenizersBackend";
    for (const char* key : {"bos_token", "eos_token", "pad_token", "unk_token"}) {
      if (!one_in(3)) config[key] = named_token();
    }
    for (const char* key : {"add_bos_token", "add_eos_token"}) {
      if (one_in(3)) config[key] = one_in(2);
    }
    if (one_in(3)) {
      config[one_in(2) ? "extra_special_tokens" : "additional_special_tokens"] = Json::array({name(), new_name()});
    }
    if (one_in(4)) config["image_token"] = new_name();
    if (one_in(6)) config["model_specific_special_tokens"] = {{"video_token", new_name()}};
    if (one_in(6)) config["extra_special_tokens"] = {{"audio_token", new_name()}};
    if (one_in(3)) {
      auto decoder = Json::object();
      for (const auto& token : added) {
        auto flags = token;
        flags.erase("id");
        if (one_in(3)) flags["special"] = !flags["special"].get<bool>();
        if (!one_in(4)) decoder[std::to_string(token["id"].get<int>())] = flags;
      }
      if (one_in(3)) {
        decoder[one_in(2) ? "9" : "700"] = {{"content", "<far>"}, {"special", one_in(2)}, {"normalized", false}};
      }
      config["added_tokens_decoder"] = decoder;
    }
    return files;
  }

 private:
  bool one_in(unsigned count) { return random_() % count == 0; }
  std::string name() {
    static const std::vector<std::string> names = {"<s>", "</s>", "<|im_start|>", "<tool>", "<|im_end|>"};
    return names[random_() % names.size()];
  }
  // The name of a token that tokenizer.json does not have.
  std::string new_name() {
    static const std::vector<std::string> names = {"<foo>", "<bar>", "<far>"};
    return names[random_() % names.size()];
  }
  Json named_token() {
    const auto content = one_in(5) ? new_name() : name();
    if (!one_in(3)) return content;
    return {{"__type", "AddedToken"},  {"content", content},  {"lstrip", one_in(4)},
            {"normalized", one_in(2)}, {"rstrip", one_in(4)}, {"single_word", false}};
  }
  Json template_around() {
    const auto piece = [](const char* kind, const std::string& id) {
      return Json{{kind, {{"id", id}, {"type_id", 0}}}};
    };
    Json single = Json::array({piece("Sequence", "A")});
    if (!one_in(3)) single.insert(single.begin(), piece("SpecialToken", "<s>"));
    if (one_in(3)) single.push_back(piece("SpecialToken", "</s>"));
    Json pair = single;
    pair.push_back({{"Sequence", {{"id", "B"}, {"type_id", 1}}}});
    const auto token = [](const char* text, int id) { return Json{{"id", text}, {"ids", {id}}, {"tokens", {text}}}; };
    return {{"type", "TemplateProcessing"},
            {"single", single},
            {"pair", pair},
            {"special_tokens", {{"<s>", token("<s>", 256)}, {"</s>", token("</s>", 257)}}}};
  }
  std::mt19937_64 random_;
};

// Files of public reports, and files for which a random test has failed.
std::vector<TokenizerFiles> fixed_files() {
  std::vector<TokenizerFiles> all;
  const auto add = [&](const char* config, bool end_is_special = true) {
    auto tokenizer = testing::chain_tokenizer();
    tokenizer["added_tokens"][4]["special"] = end_is_special;
    all.push_back({tokenizer, Json::parse(config)});
  };
  add(R"({"bos_token": "<s>", "add_bos_token": true})");
  add(R"({"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": false, "add_eos_token": true})");
  add(R"({"eos_token": "<|im_end|>"})", /*end_is_special=*/false);
  add(R"({"eos_token": "</s>", "pad_token": "<tool>"})");
  add(R"({"eos_token": "<foo>", "pad_token": "<bar>", "additional_special_tokens": ["<far>"]})");
  add(R"({"pad_token": "<bar>", "eos_token": "<foo>", "extra_special_tokens": {"a": "<far>"}})");
  add(R"({"added_tokens_decoder": {"259": {"content": "<tool>", "special": true, "normalized": false}}})");
  return all;
}

TEST(TokenizerConfigOracle, SpecialTokensAndTheirFlagsMatchTransformers) {
  const uint64_t seed = drawn_seed();
  SCOPED_TRACE(fmt::format("TESSERA_SEED={}", seed));
  auto all = fixed_files();
  DrawnFiles drawn(seed);
  for (int i = 0; i < 60; ++i) all.push_back(drawn.draw());
  const std::vector<std::string> texts = {"a<|im_end|>b",
                                          "<s>x</s>",
                                          "x <tool> y<|im_start|> z",
                                          "<|im_end|>",
                                          "<|im_start|>user\nhi<|im_end|>\n",
                                          "",
                                          "<|im_end <s> |>",
                                          "a <foo> b<bar><far>"};
  TempFolder folder;
  std::string input;
  for (size_t i = 0; i < all.size(); ++i) {
    const auto dir = folder / std::to_string(i);
    std::filesystem::create_directories(dir);
    publish_file(dir / "tokenizer.json", all[i].tokenizer.dump());
    publish_file(dir / "tokenizer_config.json", all[i].config.dump());
    input += Json{{"folder", dir.string()}, {"texts", texts}}.dump() + "\n";
  }
  const auto run =
      testing::run_python("tests/trials/oracle/auto_tokenizers.py", {}, {.input = input, .timeout_seconds = 300});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  std::istringstream lines(run.out);
  for (size_t i = 0; i < all.size(); ++i) {
    std::string line;
    ASSERT_TRUE(std::getline(lines, line));
    const auto expected = Json::parse(line);
    const auto tokenizer = text::Tokenizer::from_folder(folder / std::to_string(i));
    for (size_t t = 0; t < texts.size(); ++t) {
      const auto plain = tokenizer.encode(texts[t], {.add_special_tokens = false});
      const auto shown = texts[t] + "\n" + all[i].config.dump() + "\n" + all[i].tokenizer["added_tokens"].dump();
      EXPECT_EQ(Json(tokenizer.encode(texts[t])), expected["ids"][t]) << shown;
      EXPECT_EQ(Json(plain), expected["plain"][t]) << shown;
      EXPECT_EQ(tokenizer.decode(plain), expected["decoded"][t].get<std::string>()) << shown;
    }
    for (const auto& [key, id] :
         {std::pair("bos", tokenizer.bos_id()), {"eos", tokenizer.eos_id()}, {"pad", tokenizer.pad_id()}}) {
      EXPECT_EQ(id ? Json(*id) : Json(), expected["named"][key]) << key << all[i].config.dump();
    }
    if (HasFailure()) break;  // one failure is enough
  }
}

}  // namespace
}  // namespace tessera
