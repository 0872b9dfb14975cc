// Tokenizer and StreamDecoder on a hand-made file: merges, special tokens, the keys of tokenizer_config.json, and
// hostile files.
#include "tessera/text/tokenizer.h"

#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/text/utf8.h"
#include "tessera/base/warning_log.h"
#include "tessera/text/embedding_rows.h"
#include "tests/data/byte_tokenizer.h"
#include "tests/support/temp_folder.h"

namespace tessera::text {
namespace {

using Json = nlohmann::json;

// A tokenizer with single characters, byte tokens, and the merged tokens ab, abc and a U+2581.
Json character_file() {
  Json vocab = {{"<unk>", 0},  {"a", 1},  {"b", 2},   {"c", 3},      {" ", 4},
                {"\u2581", 5}, {"ab", 6}, {"abc", 7}, {"a\u2581", 8}};
  for (int byte = 0; byte < 256; ++byte) {
    char token[8];
    std::snprintf(token, sizeof token, "<0x%02X>", byte);
    vocab[token] = 100 + byte;
  }
  return {{"version", "1.0"},
          {"added_tokens", Json::array()},
          {"normalizer", nullptr},
          {"pre_tokenizer", nullptr},
          {"post_processor", nullptr},
          {"decoder",
           {{"type", "Sequence"},
            {"decoders",
             {{{"type", "Replace"}, {"pattern", {{"String", "\u2581"}}}, {"content", " "}},
              {{"type", "ByteFallback"}},
              {{"type", "Fuse"}}}}}},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", "<unk>"},
            {"fuse_unk", true},
            {"byte_fallback", true},
            {"vocab", vocab},
            {"merges", {"a b", "ab c", "a \u2581"}}}}};
}

Json special(const std::string& content, bool is_special = true) {
  return {{"id", 999},       {"content", content},  {"single_word", false}, {"lstrip", false},
          {"rstrip", false}, {"normalized", false}, {"special", is_special}};
}

Tokenizer load(const Json& file) { return Tokenizer::from_json(file.dump(), "test.json"); }

using Ids = std::vector<TokenId>;

TEST(Tokenizer, MergesByRankThenFromTheLeft) {
  const auto tokenizer = load(character_file());
  EXPECT_EQ(tokenizer.encode("abcab"), (Ids{7, 6}));
  EXPECT_EQ(tokenizer.encode("a\u2581b\u2581a"), (Ids{8, 2, 5, 1}));
  EXPECT_EQ(tokenizer.encode("a\u00e9"), (Ids{1, 100 + 0xC3, 100 + 0xA9}));
  EXPECT_TRUE(tokenizer.encode("").empty());
}

TEST(Tokenizer, LongAndShortWordsMergeInTheSameWay) {
  const auto tokenizer = load(character_file());
  std::string text;
  Ids expected;
  for (int i = 0; i < 5000; ++i) {  // far more than the cache and the scanning merge take
    text += i % 3 == 0 ? "abc" : i % 3 == 1 ? "ab" : "cb";
    if (i % 3 == 0) expected.push_back(7);
    if (i % 3 == 1) expected.push_back(7), text += "c";
    if (i % 3 == 2) expected.insert(expected.end(), {3, 2});
  }
  EXPECT_EQ(tokenizer.encode(text), expected);
  EXPECT_EQ(tokenizer.encode_with_offsets(text).ids, expected);
}

TEST(Tokenizer, InvalidUtf8CountsAsReplacementCharacters) {
  const auto tokenizer = load(character_file());
  const Ids replacement = {100 + 0xEF, 100 + 0xBF, 100 + 0xBD};
  // Each invalid byte counts as one character. A truncated character counts as one in total, as in Rust.
  for (const auto& [bytes, count] : std::vector<std::pair<std::string, size_t>>{{"\xFF", 1},
                                                                                {"\xC3", 1},
                                                                                {"\xE2\x96", 1},
                                                                                {"\xF0\x9F\x98", 1},
                                                                                {"\xED\xA0\x80", 3},
                                                                                {"\xC0\x80", 2},
                                                                                {"\xF5\x80", 2},
                                                                                {"\x80\x80", 2},
                                                                                {"\xE0\x80", 2}}) {
    Ids expected = {1};
    for (size_t i = 0; i < count; ++i) expected.insert(expected.end(), replacement.begin(), replacement.end());
    expected.push_back(2);
    const auto encoding = tokenizer.encode_with_offsets("a" + bytes + "b");
    EXPECT_EQ(encoding.ids, expected) << Json(bytes).dump(-1, ' ', true, Json::error_handler_t::replace);
    EXPECT_EQ(tokenizer.encode("a" + bytes + "b"), expected);
    EXPECT_EQ(encoding.offsets.back(), (std::pair<size_t, size_t>{1 + bytes.size(), 2 + bytes.size()}));
  }
}

TEST(Tokenizer, SpecialTokensAreParsedOnlyWhenAsked) {
  auto file = character_file();
  file["added_tokens"] = {special("<s>"), special("bc", false)};
  const auto tokenizer = load(file);
  const TokenId bos = *tokenizer.token_to_id("<s>"), added = *tokenizer.token_to_id("bc");
  EXPECT_EQ(tokenizer.encode("<s>abc"), (Ids{bos, 1, added}));
  EXPECT_EQ(tokenizer.encode("abc<s>", {.parse_special = false}), (Ids{1, added, 100 + '<', 100 + 's', 100 + '>'}));
  EXPECT_TRUE(tokenizer.is_special(bos));
  EXPECT_FALSE(tokenizer.is_special(added));
  EXPECT_FALSE(tokenizer.is_special(-1));
  EXPECT_EQ(tokenizer.decode(Ids{bos, 1, added}), "abc");
  EXPECT_EQ(tokenizer.decode(Ids{bos, 1, added}, false), "<s>abc");
  EXPECT_EQ(tokenizer.decode(Ids{-7, 1 << 30, 50, 1}), "a");
  EXPECT_EQ(tokenizer.vocab_size(), static_cast<size_t>(356));
  EXPECT_THROW(tokenizer.id_to_token(50), Error);
  EXPECT_EQ(tokenizer.id_to_token(added), "bc");
}

TEST(Tokenizer, ConfigNamesBosEosAndPad) {
  testing::TempFolder folder;
  auto file = character_file();
  file["model"]["vocab"]["<s>"] = 20;
  file["model"]["vocab"]["</s>"] = 21;
  file["added_tokens"] = {special("<s>"), special("</s>")};
  publish_file(folder / "tokenizer.json", file.dump());
  publish_file(folder / "tokenizer_config.json",
               R"({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": null})");
  const auto tokenizer = Tokenizer::from_folder(folder.path());
  EXPECT_EQ(tokenizer.bos_id(), 20);
  EXPECT_EQ(tokenizer.eos_id(), 21);
  EXPECT_EQ(tokenizer.pad_id(), std::nullopt);
  EXPECT_EQ(tokenizer.encode("ab"), Ids{6}) << "the post-processor alone adds tokens";
}

// As transformers 5 does. Older versions of transformers made a post-processor from both keys.
TEST(Tokenizer, IgnoredAddTokenKeysAreWarnedAboutOnce) {
  const Json adds_bos = {
      {"type", "TemplateProcessing"},
      {"single", {{{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}}, {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}}},
      {"pair", Json::array()},
      {"special_tokens", {{"<s>", {{"id", "<s>"}, {"ids", {20}}, {"tokens", {"<s>"}}}}}}};
  struct Case {
    bool file_adds_bos;
    const char* keys;
    bool told;
  };
  for (const auto& each :
       {Case{false, R"("add_bos_token": true)", true}, Case{false, R"("add_bos_token": false)", false},
        Case{true, R"("add_bos_token": true, "add_eos_token": false)", false},
        Case{true, R"("add_bos_token": false)", true}, Case{true, R"("add_eos_token": true)", true},
        Case{true, R"("add_bos_token": true, "add_eos_token": true)", true},
        Case{false, R"("add_bos_token": null)", false}, Case{true, R"("x": 1)", false}}) {
    SCOPED_TRACE(each.keys);
    testing::TempFolder folder;
    auto file = character_file();
    file["model"]["vocab"]["<s>"] = 20;
    file["model"]["vocab"]["</s>"] = 21;
    file["added_tokens"] = {special("<s>"), special("</s>")};
    if (each.file_adds_bos) file["post_processor"] = adds_bos;
    publish_file(folder / "tokenizer.json", file.dump());
    publish_file(folder / "tokenizer_config.json",
                 std::string(R"({"bos_token": "<s>", "eos_token": "</s>", )") + each.keys + "}");
    WarningLog warnings;
    const auto tokenizer = Tokenizer::from_folder(folder.path());
    EXPECT_EQ(tokenizer.encode("ab"), (each.file_adds_bos ? Ids{20, 6} : Ids{6}));
    const auto told = warnings.take_warnings();
    ASSERT_EQ(told.size(), each.told ? 1U : 0U);
    if (each.told) {
      EXPECT_NE(told[0].find("add_bos_token and add_eos_token are ignored"), std::string::npos) << told[0];
    }
  }
}

// A token that the config names is special, and is found in a text as one token, even if tokenizer.json says otherwise.
TEST(Tokenizer, TokensThatTheConfigNamesAreSpecial) {
  const auto tokenizer_of = [](const Json& added, const char* config) {
    testing::TempFolder folder;
    auto file = character_file();
    file["model"]["vocab"]["<end>"] = 20;
    file["model"]["vocab"]["<pad>"] = 21;
    file["added_tokens"] = added;
    publish_file(folder / "tokenizer.json", file.dump());
    publish_file(folder / "tokenizer_config.json", config);
    return Tokenizer::from_folder(folder.path());
  };
  auto plain = special("<end>");
  plain["special"] = false;
  for (const auto& added : {Json::array(), Json::array({plain})}) {
    for (const char* config : {R"({"eos_token": "<end>"})", R"({"pad_token": {"content": "<end>", "lstrip": false}})",
                               R"({"extra_special_tokens": ["<end>"]})", R"({"additional_special_tokens": ["<end>"]})",
                               R"({"added_tokens_decoder": {"20": {"content": "<end>", "special": true}}})"}) {
      SCOPED_TRACE(config);
      const auto tokenizer = tokenizer_of(added, config);
      // As in transformers, a token that tokenizer.json has added keeps its flags if only a list names it.
      const bool is_listed_alone = std::string_view(config).find("special_tokens\": [") != std::string_view::npos;
      const bool is_special = added.empty() || !is_listed_alone;
      EXPECT_EQ(tokenizer.is_special(20), is_special);
      EXPECT_TRUE(tokenizer.is_added(20));
      EXPECT_FALSE(tokenizer.is_added(21));
      EXPECT_EQ(tokenizer.encode("ab<end>ab"), (Ids{6, 20, 6}));
      EXPECT_EQ(tokenizer.decode(Ids{6, 20}), is_special ? "ab" : "ab<end>");
      EXPECT_EQ(tokenizer.special_tokens_in("a<end>").size(), is_special ? 1U : 0U);
    }
    const auto tokenizer = tokenizer_of(added, R"({"x_token": true, "bos_token": null})");
    EXPECT_FALSE(tokenizer.is_special(20));
    EXPECT_EQ(tokenizer.is_added(20), !added.empty());
    EXPECT_EQ(tokenizer.vocab_size(), 356U);
  }
}

// tests/trials/tokenizer_config_oracle_test.cc compares the same cases with transformers.
TEST(Tokenizer, TokensThatTheConfigAddsGetTheNextFreeIds) {
  const auto tokenizer_of = [](const char* config, const char* map = nullptr) {
    testing::TempFolder folder;
    auto file = character_file();  // this copy has ids without gaps
    for (auto& [token, id] : file["model"]["vocab"].items()) {
      if (id >= 100) id = id.get<int>() - 91;
    }
    publish_file(folder / "tokenizer.json", file.dump());
    publish_file(folder / "tokenizer_config.json", config);
    if (map) publish_file(folder / "special_tokens_map.json", map);
    return Tokenizer::from_folder(folder.path());
  };
  const auto next = static_cast<TokenId>(tokenizer_of("{}").vocab_size());
  for (const char* config :
       {R"({"eos_token": "<foo>"})", R"({"image_token": "<foo>"})", R"({"extra_special_tokens": ["<foo>"]})",
        R"({"extra_special_tokens": {"a": "<foo>"}})", R"({"additional_special_tokens": ["<foo>"]})",
        R"({"model_specific_special_tokens": {"a_token": "<foo>"}})",
        R"({"added_tokens_decoder": {"9000": {"content": "<foo>", "special": true}}})"}) {
    SCOPED_TRACE(config);
    const auto tokenizer = tokenizer_of(config);
    EXPECT_EQ(tokenizer.vocab_size(), static_cast<size_t>(next) + 1);
    EXPECT_EQ(tokenizer.encode("ab<foo>ab"), (Ids{6, next, 6}));
    EXPECT_TRUE(tokenizer.is_special(next));
    EXPECT_EQ(tokenizer.decode(Ids{6, next}), "ab");
  }
  EXPECT_EQ(tokenizer_of(R"({"pad_token": "<foo>", "eos_token": "<bar>"})").eos_id(), next) << "EOS comes first";
  EXPECT_EQ(tokenizer_of("{}", R"({"additional_special_tokens": ["<foo>"]})").encode("<foo>"), Ids{next});
  EXPECT_EQ(tokenizer_of("{}", R"({"image_token": "<foo>"})").encode("<foo>"), Ids{next});
  // A value that repeats an earlier value is ignored. The object is new, because no string equals it: its flags count.
  const auto thrice = tokenizer_of(
      R"({"unk_token": "<foo>", "pad_token": {"content": "<foo>", "rstrip": true}, "image_token": "<foo>"})");
  EXPECT_EQ(thrice.encode("<foo> ab"), (Ids{next, 6}));
}

TEST(Tokenizer, IdsBeyondTheEmbeddingRowsAreAnErrorThatNamesTheToken) {
  const auto tokenizer = load(character_file());
  const auto last = static_cast<TokenId>(tokenizer.vocab_size()) - 1;
  EXPECT_NO_THROW(check_embedding_rows(tokenizer, Ids{6, last}, last + 1, "a.jsonl"));
  for (const auto& [ids, named] : {std::pair(Ids{6, last}, fmt::format("token {} ('", last)),
                                   {Ids{last + 9}, fmt::format("token {}, ", last + 9)}}) {
    try {
      check_embedding_rows(tokenizer, ids, last, "a.jsonl");
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kConfig);
      const std::string what = error.what();
      EXPECT_NE(what.find("a.jsonl: holds " + named), std::string::npos) << what;
      EXPECT_NE(what.find("resize the model's embedding"), std::string::npos) << what;
    }
  }
}

TEST(Tokenizer, FolderWithoutTheFileIsAnIoErrorThatNamesIt) {
  testing::TempFolder folder;
  try {
    Tokenizer::from_folder(folder.path());
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kIo);
    EXPECT_NE(std::string(error.what()).find("tokenizer.json"), std::string::npos);
  }
}

TEST(StreamDecoder, PiecesAreCompleteUtf8AndJoinToTheFullText) {
  const auto tokenizer = load(character_file());
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    std::string text;
    for (int i = 0; i < 20; ++i) {
      text +=
          std::vector<std::string>{"a", "bc", "\u00e9", "\u4f60", "\U0001f600", "\u2581", "ab", "\ufffd"}[random() % 8];
    }
    const auto ids = tokenizer.encode(text);
    StreamDecoder stream(tokenizer);
    std::string joined;
    for (const TokenId id : ids) {
      const std::string piece = stream.push(id);
      EXPECT_NO_THROW(Json(piece).dump()) << "not UTF-8";  // dump() throws on incomplete characters
      joined += piece;
    }
    joined += stream.finish();
    EXPECT_EQ(joined, tokenizer.decode(ids));
  }
}

TEST(StreamDecoder, BuffersIncompleteCharactersUntilTheirLastByteOrTheEnd) {
  const auto tokenizer = load(character_file());
  StreamDecoder stream(tokenizer);
  EXPECT_EQ(stream.push(100 + 0xC3), "");
  EXPECT_EQ(stream.push(100 + 0xA9), "\u00e9");
  EXPECT_EQ(stream.push(1), "a");
  EXPECT_EQ(stream.push(100 + 0xE2), "");
  EXPECT_EQ(stream.finish(), "\ufffd");
  EXPECT_EQ(stream.push(2), "b");
}

TEST(Tokenizer, BytesOfTokensJoinToTheText) {
  const testing::TempFolder folder;
  auto stripping = character_file();  // as Llama's: removes the space before a text
  stripping["decoder"]["decoders"].push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
  auto metaspace = character_file();
  metaspace["decoder"] = {{"type", "Metaspace"}, {"replacement", "\u2581"}, {"prepend_scheme", "always"}};
  auto with_special = character_file();
  with_special["added_tokens"].push_back(special("<end>"));
  const std::string text = "abc a\u00e9\u4f60 \U0001f600b";
  for (const auto& tokenizer :
       {load(character_file()), load(stripping), load(with_special), data::make_byte_tokenizer(folder.path())}) {
    std::string joined;
    size_t parts = 0;
    for (const TokenId id : tokenizer.encode(text)) {
      const auto bytes = tokenizer.token_bytes(id);
      joined += bytes;
      parts += !is_valid_utf8(bytes);
    }
    EXPECT_EQ(joined, text);
    EXPECT_EQ(parts, 9U) << "bytes of a character";
  }
  EXPECT_EQ(load(metaspace).token_bytes(5), " ") << "inside a text, where decode() has the first of one";
  EXPECT_EQ(load(metaspace).decode(Ids{5}), "");
  EXPECT_EQ(load(stripping).token_bytes(4), " ");
  const auto specials = load(with_special);
  EXPECT_EQ(specials.token_bytes(specials.token_to_id("<end>").value()), "<end>");
  for (const TokenId none : {-1, 50, 1'000'000}) EXPECT_EQ(load(character_file()).token_bytes(none), "") << none;
}

TEST(Tokenizer, ThreadsShareOneTokenizer) {
  const auto tokenizer = load(character_file());
  std::string text;
  for (int i = 0; i < 300; ++i) text += i % 7 == 0 ? "\u2581abc\u00e9" : "ab\u2581c";
  const auto expected = tokenizer.encode(text);
  std::vector<std::thread> threads;
  std::vector<int> wrong(4, 0);
  for (size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 50; ++i) wrong[t] += tokenizer.encode(text) != expected;
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<int>(4, 0));
}

struct Hostile {
  const char* what;
  std::function<void(Json&)> change;
  const char* named;  // text that the message must contain
};

TEST(Tokenizer, EveryHostileFileIsAFormatErrorThatNamesTheCause) {
  const std::vector<Hostile> cases = {
      {"Unigram",
       [](Json& f) {
         f["model"] = {{"type", "Unigram"}, {"vocab", Json::array({Json::array({"a", -1.0})})}, {"unk_id", 0}};
       },
       "Unigram"},
      {"no model", [](Json& f) { f.erase("model"); }, "model"},
      {"model is a number", [](Json& f) { f["model"] = 7; }, "model"},
      {"vocab is an array", [](Json& f) { f["model"]["vocab"] = {"a"}; }, "model.vocab"},
      {"negative id", [](Json& f) { f["model"]["vocab"]["a"] = -1; }, "model.vocab"},
      {"string id", [](Json& f) { f["model"]["vocab"]["a"] = "1"; }, "model.vocab"},
      {"nested id",
       [](Json& f) {
         f["model"]["vocab"]["a"] = {{"b", 1}};
       },
       "model.vocab"},
      {"huge id", [](Json& f) { f["model"]["vocab"]["a"] = 4'000'000'000u; }, "4000000000"},
      {"one id for two tokens", [](Json& f) { f["model"]["vocab"]["a"] = f["model"]["vocab"]["b"]; }, "both have id"},
      {"merge outside the vocabulary", [](Json& f) { f["model"]["merges"] = {"a z"}; }, "'z'"},
      {"product outside the vocabulary", [](Json& f) { f["model"]["merges"] = {"b a"}; }, "'ba'"},
      {"merge of three", [](Json& f) { f["model"]["merges"] = {"a b c"}; }, "merges[0]"},
      {"merge triple",
       [](Json& f) {
         f["model"]["merges"] = {{"a", "b", "c"}};
       },
       "merges[0]"},
      {"merge number", [](Json& f) { f["model"]["merges"] = {1}; }, "merges[0]"},
      {"merge object", [](Json& f) { f["model"]["merges"] = {Json::object()}; }, "merges[0]"},
      {"dropout", [](Json& f) { f["model"]["dropout"] = 0.1; }, "dropout"},
      {"unknown unk", [](Json& f) { f["model"]["unk_token"] = "<nix>"; }, "<nix>"},
      {"normalizer",
       [](Json& f) {
         f["normalizer"] = {{"type", "Precompiled"}};
       },
       "Precompiled"},
      {"normalizer is a list", [](Json& f) { f["normalizer"] = Json::array(); }, "normalizer"},
      {"pre-tokenizer",
       [](Json& f) {
         f["pre_tokenizer"] = {{"type", "UnicodeScripts"}};
       },
       "UnicodeScripts"},
      {"behavior",
       [](Json& f) {
         f["pre_tokenizer"] = {
             {"type", "Split"}, {"pattern", {{"String", " "}}}, {"behavior", "Odd"}, {"invert", false}};
       },
       "Odd"},
      {"regex",
       [](Json& f) {
         f["pre_tokenizer"] = {
             {"type", "Split"}, {"pattern", {{"Regex", "(a"}}}, {"behavior", "Isolated"}, {"invert", false}};
       },
       "(a"},
      {"deep regex",
       [](Json& f) {
         f["pre_tokenizer"] = {{"type", "Split"},
                               {"pattern", {{"Regex", std::string(5000, '(')}}},
                               {"behavior", "Isolated"},
                               {"invert", false}};
       },
       "pattern"},
      {"post-processor",
       [](Json& f) {
         f["post_processor"] = {{"type", "BertProcessing"}};
       },
       "BertProcessing"},
      {"template without its token",
       [](Json& f) {
         f["post_processor"] = {{"type", "TemplateProcessing"},
                                {"single", {{{"SpecialToken", {{"id", "<q>"}}}}}},
                                {"special_tokens", Json::object()}};
       },
       "<q>"},
      {"decoder",
       [](Json& f) {
         f["decoder"] = {{"type", "WordPiece"}};
       },
       "WordPiece"},
      {"added token without content",
       [](Json& f) {
         f["added_tokens"] = {{{"id", 1}}};
       },
       "content"},
      {"added tokens object", [](Json& f) { f["added_tokens"] = Json::object(); }, "added_tokens"},
      {"nesting",
       [](Json& f) {
         Json deep = 1;
         for (int i = 0; i < 200; ++i) deep = Json::array({deep});
         f["x"] = deep;
       },
       "nested"},
  };
  for (const auto& hostile : cases) {
    auto file = character_file();
    hostile.change(file);
    try {
      load(file);
      ADD_FAILURE() << hostile.what << ": no error";
    } catch (const Error& error) {
      const std::string message = error.what();
      EXPECT_EQ(error.kind(), ErrorKind::kFormat) << hostile.what;
      EXPECT_NE(message.find(hostile.named), std::string::npos) << hostile.what << ": " << message;
      EXPECT_NE(message.find("test.json"), std::string::npos) << hostile.what << ": " << message;
      EXPECT_EQ(message.find('\n'), std::string::npos) << hostile.what << ": " << message;
    }
  }
  for (const char* text : {"", "[", "7", "{\"model\"", "\xFF", "null"}) {
    EXPECT_THROW(Tokenizer::from_json(text, "test.json"), Error) << text;
  }
}

TEST(Tokenizer, CatastrophicRegexIsAnError) {
  auto file = character_file();
  file["pre_tokenizer"] = {
      {"type", "Split"}, {"pattern", {{"Regex", "(a+)+(a+)+(a+)+[bc]d"}}}, {"behavior", "Isolated"}, {"invert", false}};
  const auto tokenizer = load(file);
  EXPECT_EQ(tokenizer.encode("abc"), Ids{7});
  try {
    tokenizer.encode(std::string(5000, 'a') + " d");
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kFormat);
    EXPECT_NE(std::string(error.what()).find("(a+)+"), std::string::npos);
  }
}

TEST(Tokenizer, OversizedReplacementIsRefusedBeforeItIsMade) {
  auto file = character_file();
  file["normalizer"] = {{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", std::string(1 << 20, 'b')}};
  const auto tokenizer = load(file);
  EXPECT_THROW(tokenizer.encode(std::string(1 << 13, 'a')), Error);
}

TEST(Tokenizer, OversizedDecodedTextIsRefusedBeforeItIsMade) {
  auto file = character_file();
  file["model"]["vocab"][std::string(60'000, 'a')] = 50;
  file["decoder"] = {{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", std::string(1 << 20, 'b')}};
  const auto tokenizer = load(file);  // the text would have 60 GB
  EXPECT_THROW(tokenizer.decode(Ids{50}), Error);
  EXPECT_EQ(tokenizer.decode(Ids{1}).size(), size_t{1} << 20);
}

TEST(Tokenizer, MessagesEscapeTerminalControlCharacters) {
  auto file = character_file();
  file["model"]["merges"] = {"\x1b[31m x"};
  try {
    load(file);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()).find('\x1b'), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace tessera::text
