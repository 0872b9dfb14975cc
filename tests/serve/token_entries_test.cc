// The log-prob entries of tokens, which must belong to the text of the answer.
#include "tessera/serve/token_entries.h"

#include <gtest/gtest.h>

#include <limits>

#include "tessera/serve/responses.h"
#include "tests/data/byte_tokenizer.h"
#include "tests/serve/serve_fixture.h"
#include "tests/support/temp_folder.h"

namespace tessera::serve {
namespace {

std::string joined_bytes(const Json& entries) {
  std::string bytes;
  for (const auto& entry : entries) {
    for (const auto& byte : entry["bytes"]) bytes += static_cast<char>(byte.get<int>());
  }
  return bytes;
}

ServedModel byte_served(const testing::TempFolder& folder) {
  return {
      .name = "bytes", .config = {}, .defaults = {}, .tokenizer = data::make_byte_tokenizer(folder.path()), .chat = {}};
}

TEST(TokenEntries, PartialCharactersAndInfiniteLogProbsAreValidJson) {
  const testing::TempFolder folder;
  const auto served = byte_served(folder);
  const double never = -std::numeric_limits<double>::infinity();
  const TokenLogProbs found{-0.5, {{'a', -0.25}, {0x80, never}}};
  const CompletionRequest request{.choices = {{.prompt = {1}}}, .prompt_tokens = 1, .log_probs = 2, .stream = true};
  Response chat(Endpoint::kChat, "x", served, request);
  EXPECT_EQ(chat.add({.text = "", .token = 0xE2, .log_probs = found}), std::nullopt) << "its text is not here";
  EXPECT_EQ(chat.add({.text = "", .token = 0x82, .log_probs = found}), std::nullopt);
  const auto chunk = Json::parse(chat.add({.text = "\xE2\x82\xAC", .token = 0xAC, .log_probs = found})->dump());
  const auto& content = chunk["choices"][0]["logprobs"]["content"];
  ASSERT_EQ(content.size(), 3U);
  EXPECT_EQ(content[0]["token"], "bytes:\\xe2");
  EXPECT_EQ(content[0]["bytes"], Json::array({0xE2}));
  EXPECT_EQ(content[0]["logprob"], -0.5);
  EXPECT_EQ(content[0]["top_logprobs"][0], Json({{"token", "a"}, {"logprob", -0.25}, {"bytes", Json::array({'a'})}}));
  EXPECT_EQ(content[0]["top_logprobs"][1],
            Json({{"token", "bytes:\\x80"}, {"logprob", -9999.0}, {"bytes", Json::array({0x80})}}));
  EXPECT_EQ(joined_bytes(content), chunk["choices"][0]["delta"]["content"]);
  Response text(Endpoint::kText, "x", served, request);
  const auto lists =
      Json::parse(text.add({.text = "", .token = 0xE2, .log_probs = found})->dump())["choices"][0]["logprobs"];
  EXPECT_EQ(lists["tokens"], Json::array({"bytes:\\xe2"}));
  EXPECT_EQ(lists["top_logprobs"][0], Json({{"a", -0.25}, {"bytes:\\x80", -9999.0}, {"bytes:\\xe2", -0.5}}))
      << "the sampled token, too";
}

// The entries of a content whose tokens have one byte each. `pieces` are the texts that are released after each token.
Json entries_of(const std::string& bytes, const std::vector<std::string>& pieces, const text::Tokenizer& tokenizer) {
  ContentEntries entries;
  Json all = Json::array();
  for (size_t i = 0; i < bytes.size(); ++i) {
    entries.add(static_cast<unsigned char>(bytes[i]), {.chosen = -1.0 * static_cast<double>(i)}, tokenizer);
    for (auto& entry : entries.take(i < pieces.size() ? pieces[i] : "", tokenizer)) all.push_back(entry);
  }
  for (auto& entry : entries.finish(tokenizer)) all.push_back(entry);
  return all;
}

TEST(TokenEntries, BytesJoinToTheContent) {
  const testing::TempFolder folder;
  const auto tokenizer = data::make_byte_tokenizer(folder.path());
  EXPECT_EQ(joined_bytes(entries_of("hello", {"h", "e", "l", "l", "o"}, tokenizer)), "hello");
  EXPECT_EQ(joined_bytes(entries_of("heSTOP", {"h", "e"}, tokenizer)), "he") << "a stop string";
  EXPECT_EQ(joined_bytes(entries_of("heSTart", {"h", "e", "", "", "STa", "r", "t"}, tokenizer)), "heSTart")
      << "the beginning of one that was held back";
  EXPECT_EQ(joined_bytes(entries_of(" hi", {"", "h", "i"}, tokenizer)), "hi") << "a blank that no text begins with";
  EXPECT_EQ(joined_bytes(entries_of("a\xFF"
                                    "b",
                                    {"a", "",
                                     "\xEF\xBF\xBD"
                                     "b"},
                                    tokenizer)),
            "a\xFF"
            "b")
      << "a byte that is no UTF-8 and comes as U+FFFD";
  const auto entries = entries_of("xab", {"", "a", "b"}, tokenizer);
  EXPECT_EQ(entries[0]["logprob"], -1.0) << "that of 'a'";
}

TEST(TokenEntries, ATruncatedTokenHasAnEntryForItsVisiblePart) {
  auto file = nlohmann::json::parse(testing::character_tokenizer("abc"));
  file["model"]["vocab"]["abc"] = 3;
  file["added_tokens"] = nlohmann::json::array();
  file["added_tokens"].push_back({{"id", 4},
                                  {"content", "<end>"},
                                  {"single_word", false},
                                  {"lstrip", false},
                                  {"rstrip", false},
                                  {"normalized", false},
                                  {"special", true}});
  const auto tokenizer = text::Tokenizer::from_json(file.dump(), "test");
  ContentEntries entries;
  entries.add(3, {.chosen = -0.5}, tokenizer);
  EXPECT_EQ(entries.take("a", tokenizer), Json::array()) << "the end of the token is held back";
  const auto cut = entries.finish(tokenizer);
  EXPECT_EQ(cut, Json::array({{{"token", "a"}, {"logprob", -0.5}, {"bytes", {97}}, {"top_logprobs", Json::array()}}}));
  entries.add(0, {}, tokenizer);
  entries.add(4, {}, tokenizer);
  EXPECT_EQ(joined_bytes(entries.take("a", tokenizer)), "a");
  EXPECT_EQ(entries.finish(tokenizer), Json::array()) << "an end token";
}

TEST(TokenEntries, TextOffsetsAreCountedInCharacters) {
  const testing::TempFolder folder;
  const auto tokenizer = data::make_byte_tokenizer(folder.path());
  TextOffsets offsets(tokenizer);
  std::vector<int64_t> places;
  const std::string text =
      "a\xE2\x82\xAC"
      "bc";
  for (const char each : text) places.push_back(offsets.offset_of(static_cast<unsigned char>(each)));
  EXPECT_EQ(places, (std::vector<int64_t>{0, 1, 1, 1, 2, 3}));
  const auto prompt = prompt_log_probs({'a', 0xC3, 0xA4, 'b'},
                                       "a\xC3\xA4"
                                       "b",
                                       {{-1, {}}, {-2, {{'x', -0.5}}}, {-3, {}}}, tokenizer);
  EXPECT_EQ(prompt["text_offset"], Json::array({0, 1, 1, 2}));
  EXPECT_EQ(prompt["token_logprobs"], Json::array({nullptr, -1.0, -2.0, -3.0}));
  EXPECT_EQ(prompt["top_logprobs"][2], Json({{"x", -0.5}, {"bytes:\\xa4", -2.0}}));
}

TEST_F(Serve, TopLogProbsContainTheSampledTokenAndOffsetsMatchTheText) {
  start();
  auto body = ask("the cat", 12);
  body["temperature"] = 2;
  body["seed"] = 3;
  for (const int likeliest : {0, 1, 4}) {
    body["logprobs"] = likeliest;
    for (const bool echo : {false, true}) {
      body["echo"] = echo;
      const auto choice = answer(body)["choices"][0];
      const auto text = choice["text"].get<std::string>();
      const auto& found = choice["logprobs"];
      ASSERT_EQ(found["tokens"].size(), echo ? 19U : 12U);
      for (const auto& list : found) EXPECT_EQ(list.size(), found["tokens"].size());
      for (size_t i = echo ? 1 : 0; i < found["tokens"].size(); ++i) {
        const auto token = found["tokens"][i].get<std::string>();
        const auto& top = found["top_logprobs"][i];
        EXPECT_EQ(top[token], found["token_logprobs"][i]) << likeliest << " " << i;
        EXPECT_LE(top.size(), static_cast<size_t>(likeliest) + 1);
        EXPECT_GE(top.size(), static_cast<size_t>(std::max(likeliest, 1)));
        EXPECT_EQ(text.substr(found["text_offset"][i].get<size_t>(), token.size()), token);
      }
      body["stream"] = true;
      std::vector<int64_t> offsets;
      const auto reply = post(body).body;
      for (size_t at = 0; (at = reply.find("data: {", at)) != std::string::npos; at += 6) {
        const auto json = nlohmann::json::parse(reply.substr(at + 6, reply.find("\n\n", at) - at - 6));
        for (const auto& offset : json["choices"][0]["logprobs"]["text_offset"]) offsets.push_back(offset);
      }
      EXPECT_EQ(offsets, found["text_offset"].get<std::vector<int64_t>>());
      body.erase("stream");
    }
  }
}

TEST_F(Serve, BytesOfAChatsLogProbsJoinToItsContent) {
  start();
  const auto free = greedy("user: hi. ", 12);
  nlohmann::json body = {{"messages", {{{"role", "user"}, {"content", "hi"}}}},
                         {"max_tokens", 12},
                         {"temperature", 0},
                         {"logprobs", true},
                         {"top_logprobs", 2}};
  for (const auto& stop : {std::string(), free.substr(5, 3), free.substr(11, 1) + "z"}) {
    if (!stop.empty()) body["stop"] = stop;
    for (const bool stream : {false, true}) {
      body["stream"] = stream;
      const auto reply = post(body, "/v1/chat/completions").body;
      std::string content, bytes;
      for (size_t at = 0; stream && (at = reply.find("data: {", at)) != std::string::npos; at += 6) {
        const auto json = nlohmann::json::parse(reply.substr(at + 6, reply.find("\n\n", at) - at - 6));
        const auto& choice = json["choices"][0];
        content += choice["delta"].value("content", "");
        if (!choice["logprobs"].is_null()) bytes += joined_bytes(Json::parse(choice["logprobs"]["content"].dump()));
      }
      if (!stream) {
        const auto choice = nlohmann::json::parse(reply)["choices"][0];
        content = choice["message"]["content"];
        bytes = joined_bytes(Json::parse(choice["logprobs"]["content"].dump()));
      }
      EXPECT_EQ(content, free.substr(0, stop.empty() ? free.npos : free.find(stop)));
      EXPECT_EQ(bytes, content) << stop << " " << stream;
    }
  }
  // The text begins with this stop string.
  body["stop"] = free.substr(0, 1);
  body["stream"] = false;
  const auto none = answer(body, "/v1/chat/completions")["choices"][0];
  EXPECT_EQ(none["message"]["content"], "");
  EXPECT_EQ(none["logprobs"]["content"], nlohmann::json::array());
}

// Calls are not part of the content, so their tokens have no entries.
TEST(TokenEntries, ToolCallsHaveNoEntries) {
  const testing::TempFolder folder;
  const auto served = byte_served(folder);
  const CompletionRequest request{.choices = {{.prompt = {1}}}, .prompt_tokens = 1, .tools = {"f"}, .log_probs = 0};
  Response response(Endpoint::kChat, "x", served, request);
  const std::string text = "Well.\n<tool_call>{\"name\": \"f\"}</tool_call>\nDone {f}";
  for (size_t i = 0; i < text.size(); ++i) {
    AnswerPiece piece{
        .text = text.substr(i, 1), .token = static_cast<unsigned char>(text[i]), .log_probs = TokenLogProbs{}};
    if (i + 1 == text.size()) piece.finish = Finish::kLength;
    response.add(piece);
  }
  const auto choice = response.full_response()["choices"][0];
  EXPECT_EQ(choice["message"]["tool_calls"].size(), 1U);
  EXPECT_EQ(joined_bytes(choice["logprobs"]["content"]), choice["message"]["content"]);
}

}  // namespace
}  // namespace tessera::serve
