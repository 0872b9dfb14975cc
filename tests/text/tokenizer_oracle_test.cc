// Ids, offsets and decoded text against the Python `tokenizers` library, with real tokenizer files and hand-made ones.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>

#include "tessera/base/files/file.h"
#include "tessera/text/tokenizer.h"
#include "tessera/text/tokenizer/unicode.h"
#include "tests/support/process.h"

namespace tessera::text {
namespace {

using Json = nlohmann::json;

Json ask_oracle(const Json& requests) {
  const auto run = testing::run_python("tests/text/oracle/tokenizer.py", {},
                                       {.input = requests.dump(), .environment = {}, .timeout_seconds = 550});
  if (run.exit_code != 0) throw std::runtime_error("the oracle failed: " + run.err);
  return Json::parse(run.out);
}

// The seed of the random texts. TESSERA_SEED repeats a run; every failure message has the seed.
uint64_t seed() {
  static const uint64_t value =
      std::getenv("TESSERA_SEED") ? std::strtoull(std::getenv("TESSERA_SEED"), nullptr, 10) : std::random_device{}();
  return value;
}

struct Outcome {
  size_t texts = 0, ids = 0;
};

Outcome expect_same(const Tokenizer& tokenizer, const Json& rows, const EncodeOptions& options,
                    const std::string& what) {
  Outcome outcome;
  size_t failures = 0;
  for (const auto& row : rows) {
    const auto text = row["text"].get<std::string>();
    const auto ids = row["ids"].get<std::vector<TokenId>>();
    const std::string shown = what + " (TESSERA_SEED=" + std::to_string(seed()) +
                              "): " + Json(text.substr(0, 400)).dump(-1, ' ', true, Json::error_handler_t::replace);
    const auto with_offsets = tokenizer.encode_with_offsets(text, options);
    EXPECT_EQ(tokenizer.encode(text, options), ids) << shown;
    EXPECT_EQ(with_offsets.ids, ids) << shown;
    EXPECT_EQ(with_offsets.offsets, (row["offsets"].get<std::vector<std::pair<size_t, size_t>>>())) << shown;
    EXPECT_EQ(tokenizer.decode(ids), row["decoded"].get<std::string>()) << shown;
    EXPECT_EQ(tokenizer.decode(ids, false), row["decoded_all"].get<std::string>()) << shown;
    outcome.texts += 1;
    outcome.ids += ids.size();
    if (::testing::Test::HasFailure() && ++failures == 3) break;
  }
  return outcome;
}

// The test vectors of llama.cpp: texts between separator lines.
std::vector<std::string> vector_texts() {
  std::vector<std::string> texts;
  for (const auto& entry : std::filesystem::directory_iterator(testing::asset("vectors"))) {
    if (entry.path().extension() != ".inp") continue;
    std::string all = read_file(entry.path());
    const std::string separator = "\n__ggml_vocab_test__\n";
    for (size_t at = 0; at < all.size();) {
      const size_t end = std::min(all.find(separator, at), all.size());
      texts.push_back(all.substr(at, end - at));
      at = end + separator.size();
    }
  }
  return texts;
}

std::vector<std::string> lines_of(std::string_view text) {
  std::vector<std::string> lines;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    lines.emplace_back(text.substr(at, end - at));
    at = end + 1;
  }
  return lines;
}

void compare_real_file(const std::string& asset_folder) {
  const auto path = testing::asset(asset_folder + "/tokenizer.json");
  const auto tokenizer = Tokenizer::from_json(read_file(path), path.string());
  const std::string book = read_file(testing::asset("text/kjv.txt")).substr(0, 1 << 20);
  auto texts = vector_texts();
  ASSERT_GT(texts.size(), 100u);
  texts.insert(texts.end(), {"!\x04\u0301a", "\x04!\x04!\x06\x06\u4f60\x04"});  // bytes that SmolLM2's vocabulary lacks
  const auto lines = lines_of(std::string_view(book).substr(0, 100'000));
  texts.insert(texts.end(), lines.begin(), lines.end());
  texts.push_back(book);
  const Json random = {{"seed", seed()}, {"count", 500}, {"length", 60}};
  const auto answers = ask_oracle({{{"file", path}, {"texts", texts}, {"random", random}},
                                   {{"file", path},
                                    {"texts", vector_texts()},
                                    {"random", random},
                                    {"add_special", false},
                                    {"parse_special", false}}});
  const auto first = expect_same(tokenizer, answers[0], {}, asset_folder);
  EXPECT_GT(first.ids, 200'000u);
  expect_same(tokenizer, answers[1], {.add_special_tokens = false, .parse_special = false}, asset_folder + " plain");
}

TEST(TokenizerOracle, Qwen3FileGivesTheSameIdsOffsetsAndText) { compare_real_file("tokenizers/qwen3"); }
TEST(TokenizerOracle, Llama3FileGivesTheSameIdsOffsetsAndText) { compare_real_file("tokenizers/llama3"); }
TEST(TokenizerOracle, Gemma3FileGivesTheSameIdsOffsetsAndText) { compare_real_file("tokenizers/gemma3"); }
TEST(TokenizerOracle, SmolLm2FileGivesTheSameIdsOffsetsAndText) { compare_real_file("smollm2"); }

// A small character-level vocabulary with merges, byte tokens and an unknown token.
Json small_model() {
  Json vocab = Json::object();
  const auto add = [&](const std::string& token) { vocab.emplace(token, vocab.size()); };
  add("<unk>");
  for (int byte = 0; byte < 256; ++byte) {
    char token[8];
    std::snprintf(token, sizeof token, "<0x%02X>", byte);
    add(token);
  }
  for (char c = 'a'; c <= 'z'; ++c) add(std::string(1, c));
  for (const char* c : {"H", "W", " ", "!", "1", "2", "3", "'", "\u2581", "\u00e9", "e\u0301", "\u0301", ".", "-"}) {
    add(c);
  }
  const std::vector<std::pair<std::string, std::string>> merges = {
      {"h", "e"},       {"l", "l"}, {"he", "ll"}, {"hell", "o"},        {"\u2581", "w"},
      {"\u2581w", "o"}, {"o", "r"}, {"l", "d"},   {"\u2581", "\u2581"}, {" ", "w"},
      {"1", "2"},       {"a", "a"}, {"aa", "aa"}, {".", "\u2581"},      {"e", "\u0301"}};
  Json pairs = Json::array();
  for (const auto& [left, right] : merges) {
    add(left + right);
    pairs.push_back({left, right});
  }
  return {{"type", "BPE"},
          {"dropout", nullptr},
          {"unk_token", "<unk>"},
          {"continuing_subword_prefix", nullptr},
          {"end_of_word_suffix", nullptr},
          {"fuse_unk", true},
          {"byte_fallback", false},
          {"ignore_merges", false},
          {"vocab", vocab},
          {"merges", pairs}};
}

// The small model in the byte-level alphabet: all 256 characters and a few merges.
Json byte_level_model() {
  Json vocab = Json::object();
  const auto add = [&](const std::string& token) { vocab.emplace(token, vocab.size()); };
  const auto utf8 = [](unsigned code) {
    return code < 0x80 ? std::string(1, static_cast<char>(code))
                       : std::string{static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 0x3F))};
  };
  for (unsigned code = '!'; code < 324; ++code) {
    if (code <= '~' || (code >= 0xA1 && code <= 0xAC) || code >= 0xAE) add(utf8(code));
  }
  Json pairs = Json::array();
  for (const auto& [left, right] : std::vector<std::pair<std::string, std::string>>{{"\u0120", "w"},
                                                                                    {"h", "e"},
                                                                                    {"l", "l"},
                                                                                    {"he", "ll"},
                                                                                    {"\u00c3", "\u00a9"},
                                                                                    {"\u0120", "\u0120"},
                                                                                    {"1", "2"},
                                                                                    {"\u0120w", "o"}}) {
    add(left + right);
    pairs.push_back({left, right});
  }
  return {{"type", "BPE"},
          {"dropout", nullptr},
          {"unk_token", nullptr},
          {"continuing_subword_prefix", ""},
          {"end_of_word_suffix", ""},
          {"fuse_unk", false},
          {"byte_fallback", false},
          {"vocab", vocab},
          {"merges", pairs}};
}

Json file_with(Json changes, Json model = small_model()) {
  Json file = {{"version", "1.0"},          {"truncation", nullptr},
               {"padding", nullptr},        {"added_tokens", Json::array()},
               {"normalizer", nullptr},     {"pre_tokenizer", nullptr},
               {"post_processor", nullptr}, {"decoder", nullptr},
               {"model", std::move(model)}};
  if (!changes.is_null()) file.update(changes);
  return file;
}

Json model_with(Json changes) {
  Json model = small_model();
  if (!changes.is_null()) model.update(changes);
  return model;
}

Json added(const std::string& content, Json flags = Json::object()) {
  Json token = {{"id", 999},       {"content", content},  {"single_word", false}, {"lstrip", false},
                {"rstrip", false}, {"normalized", false}, {"special", false}};
  token.update(flags);
  return token;
}

const std::vector<std::string>& tricky_texts() {
  static const std::vector<std::string> texts = {
      "",
      " ",
      "hello world",
      "  hello   world  ",
      "Hello, w\u00f6rld!",
      "hello\nworld\r\n\n",
      "12345 12 1",
      "h\u00e9llo he\u0301llo",
      "caf\u00e9",
      "it's we'll I'M don'T",
      "\u4f60\u597d world",
      "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
      "a<x>b <y> c",
      "<x><x>",
      "  <x>  <y>  ",
      "hello<x>world",
      "a<x>b<x",
      "\u2581w\u2581\u2581w",
      "\U0001f600\U0001f600 a",
      "zz \u00ff\u00ff zz",
      "tab\tand\u00a0nbsp\u3000wide",
      "HELLO World",
      "\u1e9b\u0323 \ufb01 \u00bd \u2460",
      "\uac00\uac01 \u1112\u1161\u11ab",
      "a.b-c!d...e",
      "--a--b--",
      "a-b",
      "-",
      "a--",
      "--a",
      "w. w .w"};
  return texts;
}

TEST(TokenizerOracle, EveryComponentMatchesOnHandMadeFiles) {
  const auto split = [](Json pattern, const std::string& behavior, bool invert = false) {
    return Json{{"type", "Split"}, {"pattern", pattern}, {"behavior", behavior}, {"invert", invert}};
  };
  const auto byte_level = [](bool prefix, bool regex, bool trim) {
    return Json{{"type", "ByteLevel"}, {"add_prefix_space", prefix}, {"trim_offsets", trim}, {"use_regex", regex}};
  };
  const auto metaspace = [](const std::string& scheme, bool splits) {
    return Json{{"type", "Metaspace"}, {"replacement", "\u2581"}, {"prepend_scheme", scheme}, {"split", splits}};
  };
  const auto replace = [](Json pattern, const std::string& content) {
    return Json{{"type", "Replace"}, {"pattern", pattern}, {"content", content}};
  };
  std::vector<std::pair<std::string, Json>> files;
  const auto add = [&](const std::string& name, Json file) { files.emplace_back(name, std::move(file)); };

  add("plain", file_with({}));
  for (const bool fuse : {false, true}) {
    for (const bool fallback : {false, true}) {
      add("fuse_unk and byte_fallback", file_with({}, model_with({{"fuse_unk", fuse}, {"byte_fallback", fallback}})));
    }
  }
  add("no unk", file_with({}, model_with({{"unk_token", nullptr}, {"byte_fallback", true}})));
  add("no unk, no fallback", file_with({}, model_with({{"unk_token", nullptr}})));
  add("ignore_merges",
      file_with({{"pre_tokenizer", {{"type", "WhitespaceSplit"}}}}, model_with({{"ignore_merges", true}})));
  {
    Json model = small_model();
    Json strings = Json::array();
    for (const auto& pair : model["merges"]) {
      if (pair[0] != " ") strings.push_back(pair[0].get<std::string>() + " " + pair[1].get<std::string>());
    }
    model["merges"] = strings;
    add("merges as strings", file_with({}, model));
  }
  {
    Json model = small_model();
    model["continuing_subword_prefix"] = "##";
    model["end_of_word_suffix"] = "</w>";
    model["merges"] = Json::array({Json::array({"h", "##e"}), Json::array({"he", "##l"})});
    for (const char* token : {"##e", "##l", "he", "hel", "##o</w>", "a</w>", "##a", "##a</w>"}) {
      model["vocab"].emplace(token, model["vocab"].size());
    }
    add("subword prefix and suffix", file_with({{"pre_tokenizer", {{"type", "WhitespaceSplit"}}}}, model));
  }
  for (const char* type : {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents"}) {
    add(type, file_with({{"normalizer", {{"type", type}}}}));
  }
  for (const bool left : {false, true}) {
    add("Strip", file_with({{"normalizer", {{"type", "Strip"}, {"strip_left", left}, {"strip_right", !left}}}}));
  }
  add("Prepend and Replace",
      file_with(
          {{"normalizer",
            {{"type", "Sequence"},
             {"normalizers", {{{"type", "Prepend"}, {"prepend", "\u2581"}}, replace({{"String", " "}}, "\u2581")}}}},
           {"added_tokens", {added("<x>"), added("<y>", {{"special", true}})}}}));
  add("Replace by regex", file_with({{"normalizer", replace({{"Regex", "[a-c]+|\\s{2,}"}}, "w!")}}));
  add("NFD, StripAccents, Lowercase",
      file_with({{"normalizer",
                  {{"type", "Sequence"},
                   {"normalizers", {{{"type", "NFD"}}, {{"type", "StripAccents"}}, {{"type", "Lowercase"}}}}}}}));
  for (const char* behavior : {"Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"}) {
    for (const bool invert : {false, true}) {
      add(std::string("Split string ") + behavior,
          file_with({{"pre_tokenizer", split({{"String", "-"}}, behavior, invert)}}));
      add(std::string("Split regex ") + behavior,
          file_with({{"pre_tokenizer", split({{"Regex", "\\s+(?!\\S)|[\\s.-]|l*"}}, behavior, invert)}}));
    }
    add(std::string("Punctuation ") + behavior,
        file_with({{"pre_tokenizer", {{"type", "Punctuation"}, {"behavior", behavior}}}}));
  }
  for (const char* regex : {"[a-z]{,1}e|(?m:e.)", "[a-z&&[^aeiou]]+", "\\N+", "\\w+|[\\W]", "\\X", "(?i)h(?#note)E"}) {
    add(std::string("Split ") + regex, file_with({{"pre_tokenizer", split({{"Regex", regex}}, "Isolated")}}));
  }
  add("Split {1,3}+", file_with({{"pre_tokenizer", split({{"Regex", "\\p{N}{1,3}+|\\w|\\W"}}, "Isolated")}}));
  for (const bool individual : {false, true}) {
    add("Digits", file_with({{"pre_tokenizer", {{"type", "Digits"}, {"individual_digits", individual}}}}));
  }
  for (const char* type : {"Whitespace", "WhitespaceSplit"}) {
    add(type, file_with({{"pre_tokenizer", {{"type", type}}}}));
  }
  for (const char* scheme : {"always", "first", "never"}) {
    for (const bool splits : {false, true}) {
      add(std::string("Metaspace ") + scheme,
          file_with({{"pre_tokenizer", metaspace(scheme, splits)},
                     {"decoder", metaspace(scheme, splits)},
                     {"added_tokens", {added("<x>"), added("<y>", {{"special", true}})}}}));
    }
  }
  add("Metaspace first behind Strip",
      file_with({{"pre_tokenizer", metaspace("first", true)},
                 {"normalizer", {{"type", "Strip"}, {"strip_left", true}, {"strip_right", false}}},
                 {"added_tokens", {added("<x>", {{"normalized", true}})}}}));
  for (const bool prefix : {false, true}) {
    for (const bool regex : {false, true}) {
      for (const bool trim : {false, true}) {
        add("ByteLevel", file_with({{"pre_tokenizer", byte_level(prefix, regex, trim)},
                                    {"post_processor", byte_level(prefix, true, trim)},
                                    {"decoder", byte_level(prefix, regex, trim)},
                                    {"added_tokens", {added("<x>"), added("<y> ", {{"special", true}})}}},
                                   byte_level_model()));
      }
    }
  }
  add("ByteLevel in the middle", file_with({{"pre_tokenizer",
                                             {{"type", "Sequence"},
                                              {"pretokenizers",
                                               {{{"type", "Punctuation"}},
                                                byte_level(false, true, false),
                                                {{"type", "Digits"}, {"individual_digits", false}}}}}}},
                                           byte_level_model()));
  add("Digits, ByteLevel",
      file_with(
          {{"pre_tokenizer",
            {{"type", "Sequence"},
             {"pretokenizers", {{{"type", "Digits"}, {"individual_digits", true}}, byte_level(false, true, false)}}}}},
          byte_level_model()));
  const Json cls = {{"id", "<x>"}, {"ids", {2}}, {"tokens", {"b"}}},
             sep = {{"id", "<y>"}, {"ids", {3, 4}}, {"tokens", {"c", "d"}}};
  const Json pair = {{{"Sequence", {{"id", "A"}, {"type_id", 0}}}}, {{"Sequence", {{"id", "B"}, {"type_id", 0}}}}};
  const Json templated = {{"type", "TemplateProcessing"},
                          {"single",
                           {{{"SpecialToken", {{"id", "<x>"}, {"type_id", 0}}}},
                            {{"Sequence", {{"id", "A"}, {"type_id", 0}}}},
                            {{"SpecialToken", {{"id", "<y>"}, {"type_id", 0}}}}}},
                          {"pair", pair},
                          {"special_tokens", {{"<x>", cls}, {"<y>", sep}}}};
  add("TemplateProcessing", file_with({{"post_processor", templated}}));
  add("ByteLevel, TemplateProcessing",
      file_with({{"pre_tokenizer", byte_level(true, true, true)},
                 {"post_processor", {{"type", "Sequence"}, {"processors", {byte_level(true, true, true), templated}}}}},
                byte_level_model()));
  add("Llama-2 decoder",
      file_with(
          {{"normalizer",
            {{"type", "Sequence"},
             {"normalizers", {{{"type", "Prepend"}, {"prepend", "\u2581"}}, replace({{"String", " "}}, "\u2581")}}}},
           {"decoder",
            {{"type", "Sequence"},
             {"decoders",
              {replace({{"String", "\u2581"}}, " "),
               {{"type", "ByteFallback"}},
               {{"type", "Fuse"}},
               {{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}}}}}}},
          model_with({{"byte_fallback", true}})));
  add("Strip decoder", file_with({{"decoder", {{"type", "Strip"}, {"content", "l"}, {"start", 1}, {"stop", 0}}}}));
  add("Strip decoder", file_with({{"decoder", {{"type", "Strip"}, {"content", "l"}, {"start", 0}, {"stop", 1}}}}));
  for (const char* flag : {"lstrip", "rstrip", "single_word", "normalized", "special"}) {
    add(std::string("added token ") + flag,
        file_with({{"added_tokens",
                    {added("<x>", {{flag, true}}), added("wo"), added("w", {{flag, true}}),
                     added("world", {{flag, true}})}}}));
  }
  add("added tokens, all flags",
      file_with({{"added_tokens",
                  {added("<x>", {{"lstrip", true}, {"rstrip", true}}), added(" <y>", {{"rstrip", true}}),
                   added("hello"), added("HELLO", {{"normalized", true}}), added("hello", {{"special", true}})}},
                 {"normalizer", {{"type", "Lowercase"}}}}));

  for (const auto& [special, parse] : {std::pair{true, true}, std::pair{false, false}}) {
    Json requests = Json::array();
    for (const auto& [name, file] : files) {
      requests.push_back({{"json", file.dump()},
                          {"texts", tricky_texts()},
                          {"random", {{"seed", seed()}, {"count", 40}, {"length", 30}}},
                          {"add_special", special},
                          {"parse_special", parse}});
    }
    const Json answers = ask_oracle(requests);
    ASSERT_EQ(answers.size(), files.size());
    for (size_t i = 0; i < files.size(); ++i) {
      const auto& [name, file] = files[i];
      ASSERT_TRUE(answers[i].is_array()) << name << ": " << answers[i].dump();
      const auto tokenizer = Tokenizer::from_json(file.dump(), name);
      expect_same(tokenizer, answers[i], {.add_special_tokens = special, .parse_special = parse}, name);
    }
  }
}

TEST(TokenizerOracle, PunctuationMatchesForEveryCharacter) {
  std::vector<std::string> texts(1);
  for (uint32_t code = 0x20; code < 0x20000; ++code) {
    if (code >= 0xD800 && code < 0xE000) continue;
    append_utf8(code,
                texts.back() += "\u044f");  // an unknown character, which joins its neighbours if they are not split
    if (code % 1024 == 1023) texts.emplace_back();
  }
  const Json file = file_with({{"pre_tokenizer", {{"type", "Punctuation"}, {"behavior", "Isolated"}}}});
  const Json answers = ask_oracle({{{"json", file.dump()}, {"texts", texts}}});
  const auto outcome = expect_same(Tokenizer::from_json(file.dump(), "punctuation"), answers[0], {}, "Punctuation");
  EXPECT_GT(outcome.ids, 1500U);
}

}  // namespace
}  // namespace tessera::text
