// The server over real sockets, with a tiny random model. Expected texts come from generate() on the same model.
#include "tessera/serve/server.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "tessera/models/generation/row_model.h"
#include "tessera/serve/responses.h"
#include "tests/data/byte_tokenizer.h"
#include "tests/serve/serve_fixture.h"
#include "tests/support/sanitized.h"
#include "tests/support/temp_folder.h"

namespace tessera::serve {
namespace {

using testing::http;

TEST_F(Serve, GreedyCompletionsMatchGenerateAndHaveUsageAndFinishReason) {
  start();
  const auto found = answer(ask("the cat", 20));
  EXPECT_EQ(found["object"], "text_completion");
  EXPECT_EQ(found["choices"][0]["text"], greedy("the cat", 20));
  EXPECT_EQ(found["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(found["usage"], (nlohmann::json{{"prompt_tokens", 7}, {"completion_tokens", 20}, {"total_tokens", 27}}));
  EXPECT_EQ(answer({{"model", "tiny"},
                    {"prompt", {19, 7, 4, 26, 2, 0, 19}},
                    {"max_tokens", 20},
                    {"temperature", 0}})["choices"][0]["text"],
            greedy("the cat", 20))
      << "token ids";
}

TEST_F(Serve, ChatsUseTheTemplateAndStream) {
  start();
  nlohmann::json body = {
      {"model", "tiny"}, {"messages", {{{"role", "user"}, {"content", "hi"}}}}, {"max_tokens", 9}, {"temperature", 0}};
  const auto whole = answer(body, "/v1/chat/completions");
  EXPECT_EQ(whole["object"], "chat.completion");
  EXPECT_EQ(whole["choices"][0]["message"]["role"], "assistant");
  EXPECT_EQ(whole["choices"][0]["message"]["content"], greedy("user: hi. ", 9));
  body["stream"] = true;
  body["stream_options"] = {{"include_usage", true}};
  const auto reply = post(body, "/v1/chat/completions");
  EXPECT_NE(reply.head.find("text/event-stream"), std::string::npos);
  const auto [text, done] = streamed(reply.body);
  EXPECT_EQ(text, greedy("user: hi. ", 9));
  EXPECT_TRUE(done);
  EXPECT_NE(reply.body.find(R"("completion_tokens":9)"), std::string::npos);
  body.erase("stream_options");
  body["stream"] = false;
  body["messages"][0]["content"] = {{{"type", "text"}, {"text", "h"}}, {{"type", "text"}, {"text", "i"}}};
  EXPECT_EQ(answer(body, "/v1/chat/completions")["choices"][0]["message"]["content"], text);
  body["tools"] = {kTool};
  EXPECT_EQ(answer(body, "/v1/chat/completions")["usage"]["prompt_tokens"].get<int>(),
            whole["usage"]["prompt_tokens"].get<int>() + 5)
      << "tools, behind the messages";
}

TEST_F(Serve, StopStringsEndTheTextBeforeThem) {
  start();
  const auto text = greedy("the cat", 20);
  auto body = ask("the cat", 20);
  body["stop"] = {"zzzz", text.substr(5, 2)};
  const auto found = answer(body);
  EXPECT_EQ(found["choices"][0]["text"], text.substr(0, text.find(text.substr(5, 2))));
  EXPECT_EQ(found["choices"][0]["finish_reason"], "stop");
}

TEST_F(Serve, SeedsAreReproducibleAndLogProbsAreReturned) {
  start();
  auto body = ask("a", 12);
  body["temperature"] = 1.4;
  body["seed"] = 5;
  body["logprobs"] = 3;
  const auto found = answer(body);
  EXPECT_EQ(answer(body)["choices"], found["choices"]);
  const auto& log_probs = found["choices"][0]["logprobs"];
  EXPECT_EQ(log_probs["tokens"].size(), 12U);
  EXPECT_LT(log_probs["token_logprobs"][0].get<double>(), 0);
  for (const auto& top : log_probs["top_logprobs"]) EXPECT_TRUE(top.size() == 3 || top.size() == 4) << top;
  auto unseeded = body;
  unseeded.erase("seed");
  EXPECT_NE(answer(unseeded)["choices"][0]["text"], answer(unseeded)["choices"][0]["text"]);
  body["seed"] = 6;
  EXPECT_NE(answer(body)["choices"][0]["text"], found["choices"][0]["text"]);
}

TEST_F(Serve, LogitBiasesAreAddedToTheLogits) {
  start();
  auto body = ask("the cat", 6);
  body["logit_bias"] = {{"3", 100}};
  body["logprobs"] = 1;
  const auto one_letter = answer(body)["choices"][0];
  EXPECT_EQ(one_letter["text"], "dddddd");
  body["logit_bias"] = nlohmann::json::object();
  const auto free = answer(body)["choices"][0];
  EXPECT_EQ(free["text"], greedy("the cat", 6));
  body["max_tokens"] = 1;
  const auto first = free["text"].get<std::string>().substr(0, 1);
  body["logit_bias"] = {{std::to_string(served_->tokenizer.encode(first)[0]), -100}};
  EXPECT_NE(answer(body)["choices"][0]["text"], first);
}

nlohmann::json with_schema(nlohmann::json ask, const nlohmann::json& schema) {
  ask["response_format"] = {{"type", "json_schema"}, {"json_schema", {{"name", "answer"}, {"schema", schema}}}};
  return ask;
}

TEST_F(Serve, ResponsesFollowTheResponseFormat) {
  start({}, "", R"("max_position_embeddings": 512)", kJsonCharacters);
  const nlohmann::json schema = {{"type", "object"},
                                 {"properties",
                                  {{"a", {{"enum", {"yes", "no"}}}},
                                   {"b", {{"type", "array"}, {"items", {{"type", "boolean"}}}, {"maxItems", 3}}}}},
                                 {"required", {"a", "b"}},
                                 {"additionalProperties", false}};
  for (const int seed : {1, 2, 3}) {
    auto body = with_schema(ask("the cat", 60), schema);
    body["temperature"] = 1;
    body["seed"] = seed;
    body["n"] = 2;
    for (const auto& choice : answer(body)["choices"]) {
      EXPECT_EQ(choice["finish_reason"], "stop") << choice;
      const auto json = nlohmann::json::parse(choice["text"].get<std::string>());
      EXPECT_TRUE(json["a"] == "yes" || json["a"] == "no") << json;
      EXPECT_TRUE(json["b"].is_array() && json["b"].size() <= 3) << json;
      EXPECT_EQ(json.size(), 2U);
    }
    body["stream"] = true;
    body["n"] = 1;
    const auto [text, done] = streamed(post(body).body);
    EXPECT_TRUE(done);
    EXPECT_TRUE(nlohmann::json::parse(text).contains("b")) << text;
  }
  auto chat = with_schema({{"messages", {{{"role", "user"}, {"content", "hi"}}}}, {"max_tokens", 60}}, schema);
  const auto message = answer(chat, "/v1/chat/completions")["choices"][0]["message"];
  EXPECT_TRUE(nlohmann::json::parse(message["content"].get<std::string>())["b"].is_array());
  // An object may have any length. An answer that is cut off is only the beginning of an object.
  auto any = ask("the cat", 40);
  any["response_format"] = {{"type", "json_object"}};
  const auto begun = answer(any)["choices"][0];
  EXPECT_EQ(begun["text"].get<std::string>()[begun["text"].get<std::string>().find_first_not_of(" ")], '{');
  EXPECT_TRUE(begun["finish_reason"] == "length" || nlohmann::json::accept(begun["text"].get<std::string>())) << begun;
}

// llama.cpp and Together accept the same key.
TEST_F(Serve, JsonObjectFormatFollowsItsSchema) {
  start({}, "", R"("max_position_embeddings": 512)", kJsonCharacters);
  auto body = ask("the cat", 60);
  body["response_format"] = {{"type", "json_object"}, {"schema", {{"const", {{"a", "b"}}}}}};
  EXPECT_EQ(answer(body)["choices"][0]["text"], R"({"a":"b"})");
  body["response_format"]["schema"] = {{"type", "string"}, {"pattern", "a"}};
  expect_error(post(body), 400, "response_format.schema: found 'pattern'");
  for (const auto& [format, wanted] : std::vector<std::pair<nlohmann::json, std::string>>{
           {{{"type", "json_object"}, {"json_schema", {{"schema", {{"const", 1}}}}}}, "found 'json_schema'"},
           {{{"type", "json_object"}, {"strict", true}}, "found 'strict', wanted type and schema"},
           {{{"type", "json_schema"}, {"json_schema", {{"schema", {{"const", 1}}}}}, {"schema", {{"const", 2}}}},
            "found 'schema', wanted type and json_schema"},
           {{{"type", "text"}, {"schema", {{"const", 1}}}}, "found 'schema', wanted type alone"}}) {
    body["response_format"] = format;
    expect_error(post(body), 400, wanted);
  }
  body["response_format"] = {{"type", "text"}, {"schema", nullptr}};
  EXPECT_EQ(post(body).status, 200);
}

// A tokenizer may have more tokens than the model has embedding rows.
TEST_F(Serve, ATokenWithoutAnEmbeddingRowIsRefusedByItsName) {
  start({}, "", "", kCharacters + "$");
  const std::string wanted = "holds token 37 ('$'), the model knows 37 tokens";
  expect_error(post(ask("the $ cat", 3)), 400, "prompt: " + wanted);
  const nlohmann::json chat = {{"messages", {{{"role", "user"}, {"content", "a $"}}}}, {"max_tokens", 3}};
  expect_error(post(chat, "/v1/chat/completions"), 400, "messages: " + wanted);
  EXPECT_EQ(post(ask("the cat", 3)).status, 200);
}

TEST_F(Serve, APromptThatFillsTheContextIsScored) {
  start({}, "", R"("max_position_embeddings": 32)");
  auto body = ask(std::string(32, 'a'), 0);
  body["echo"] = true;
  body["logprobs"] = 0;
  const auto choice = answer(body)["choices"][0];
  EXPECT_EQ(choice["text"], std::string(32, 'a'));
  EXPECT_EQ(choice["logprobs"]["token_logprobs"].size(), 32U) << choice;
  EXPECT_TRUE(choice["logprobs"]["token_logprobs"][31].is_number());
  body["prompt"] = std::string(33, 'a');
  expect_error(post(body), 400, "maximum context length is 32 tokens");
  body["prompt"] = std::string(32, 'a');
  body["max_tokens"] = 1;
  expect_error(post(body), 400, "maximum context length is 32 tokens");
}

TEST_F(Serve, RequiredToolsAreCalled) {
  start({}, "", R"("max_position_embeddings": 512)", kJsonCharacters);
  const auto tool = [](const char* name, const nlohmann::json& parameters) {
    return nlohmann::json{{"type", "function"}, {"function", {{"name", name}, {"parameters", parameters}}}};
  };
  const nlohmann::json city = {{"type", "object"},
                               {"properties", {{"city", {{"enum", {"rome", "oslo"}}}}}},
                               {"required", {"city"}},
                               {"additionalProperties", false}};
  const nlohmann::json none = {
      {"type", "object"}, {"properties", nlohmann::json::object()}, {"additionalProperties", false}};
  nlohmann::json body = {{"messages", {{{"role", "user"}, {"content", "hi"}}}},
                         {"tools", {tool("weather", city), tool("now", none)}},
                         {"max_tokens", 90}};
  std::set<std::string> called;
  for (int seed = 0; seed < 12; ++seed) {
    body["seed"] = seed;
    body["tool_choice"] = "required";
    const auto choice = answer(body, "/v1/chat/completions")["choices"][0];
    EXPECT_EQ(choice["finish_reason"], "tool_calls") << choice;
    const auto& call = choice["message"]["tool_calls"][0]["function"];
    called.insert(call["name"]);
    const auto arguments = nlohmann::json::parse(call["arguments"].get<std::string>());
    EXPECT_EQ(arguments.contains("city"), call["name"] == "weather") << call;
    body["tool_choice"] = {{"type", "function"}, {"function", {{"name", "now"}}}};
    EXPECT_EQ(answer(body, "/v1/chat/completions")["choices"][0]["message"]["tool_calls"][0]["function"]["name"],
              "now");
  }
  EXPECT_EQ(called, (std::set<std::string>{"now", "weather"}));
  // With a response format and optional tools, the output is either a call or a text of that format.
  body["tool_choice"] = "auto";
  const auto either = answer(with_schema(body, {{"enum", {"yes"}}}), "/v1/chat/completions")["choices"][0];
  EXPECT_TRUE(either["finish_reason"] == "tool_calls" || either["message"]["content"] == "\"yes\"") << either;
}

// If the template puts calls between tags, the grammar requires the tags.
TEST(AnswerForms, CallsAreBetweenTagsIfTheTemplateUsesThem) {
  const auto tokenizer = text::Tokenizer::from_json(testing::character_tokenizer(kJsonCharacters + "<>/"), "test");
  const Json any = Json::object();
  const Json tools = Json::array({{{"type", "function"}, {"function", {{"name", "f"}, {"parameters", any}}}}});
  AnswerForms forms;
  AnswerFormOptions options{.tools = JsonReader(tools, "tools"), .tagged = true};
  const auto masks = forms.of(options, tokenizer);
  const auto complete = [&](const auto& of, const std::string& text) {
    text::TokenConstraint constraint(of, {});
    const auto ids = tokenizer.encode(text);
    return constraint.complete(std::vector<int64_t>(ids.begin(), ids.end()));
  };
  EXPECT_TRUE(complete(masks, R"(<tool_call>{"name":"f","arguments":{}}</tool_call>)"));
  EXPECT_TRUE(complete(masks, R"(<tool_call> {"name": "f", "parameters": {"a":[]} } </tool_call>)"));
  EXPECT_THROW(complete(masks, R"({"name":"f","arguments":{}})"), Error);
  EXPECT_EQ(forms.of(options, tokenizer), masks);
  options.tagged = false;
  const auto bare = forms.of(options, tokenizer);
  EXPECT_NE(bare, masks);
  EXPECT_TRUE(complete(bare, R"({"name":"f","arguments":{}})"));
  EXPECT_EQ(forms.of({}, tokenizer), nullptr);
  // A function without parameters takes no arguments.
  for (const auto& function : {Json{{"name", "f"}}, Json{{"name", "f"}, {"parameters", nullptr}}}) {
    const Json bare_tools = Json::array({{{"type", "function"}, {"function", function}}});
    const auto none = forms.of({.tools = JsonReader(bare_tools, "tools")}, tokenizer);
    EXPECT_TRUE(complete(none, R"({"name":"f","arguments":{}})"));
    EXPECT_THROW(complete(none, R"({"name":"f","arguments":{"a":[]}})"), Error);
  }
}

TEST_F(Serve, APromptIsEchoedWithTheLogProbsOfItsTokens) {
  start();
  auto body = ask("the cat", 5);
  body["echo"] = true;
  EXPECT_EQ(answer(body)["choices"][0]["text"], "the cat" + greedy("the cat", 5));
  body["logprobs"] = 2;
  const auto found = answer(body)["choices"][0]["logprobs"];
  ASSERT_EQ(found["tokens"].size(), 12U);
  EXPECT_EQ(found["tokens"][4], "c");
  EXPECT_TRUE(found["token_logprobs"][0].is_null());
  EXPECT_TRUE(found["top_logprobs"][0].is_null());
  const auto ids = served_->tokenizer.encode("the cat" + greedy("the cat", 5));
  const at::NoGradGuard no_grad;
  const auto tokens = at::tensor(std::vector<int64_t>(ids.begin(), ids.end()), at::kLong).unsqueeze(0);
  const auto wanted = at::log_softmax(model_->logits({.tokens = tokens})[0], -1);
  for (size_t i = 1; i < 12; ++i) {
    EXPECT_NEAR(found["token_logprobs"][i].get<double>(), wanted[static_cast<int64_t>(i) - 1][ids[i]].item<double>(),
                1e-4)
        << i;
    EXPECT_TRUE(found["top_logprobs"][i].size() == 2 || found["top_logprobs"][i].size() == 3) << i;
  }

  auto streaming = body;
  streaming["stream"] = true;
  EXPECT_EQ(streamed(post(streaming).body).first, "the cat" + greedy("the cat", 5));

  body["max_tokens"] = 0;
  body["prompt"] = {{19, 7, 4}, {0, 1}};
  body["n"] = 2;
  const auto alone = answer(body);
  EXPECT_EQ(alone["usage"], (nlohmann::json{{"prompt_tokens", 5}, {"completion_tokens", 0}, {"total_tokens", 5}}));
  ASSERT_EQ(alone["choices"].size(), 4U);
  for (size_t i = 0; i < 4; ++i) {
    const auto& choice = alone["choices"][i];
    EXPECT_EQ(choice["text"], i < 2 ? "the" : "ab");
    EXPECT_EQ(choice["finish_reason"], "length");
    ASSERT_EQ(choice["logprobs"]["tokens"].size(), i < 2 ? 3U : 2U);
    EXPECT_EQ(choice["logprobs"]["token_logprobs"].size(), choice["logprobs"]["top_logprobs"].size());
  }
  EXPECT_EQ(alone["choices"][0]["logprobs"]["token_logprobs"][2], found["token_logprobs"][2]);
  body["stream"] = true;
  EXPECT_EQ(streamed(post(body).body).first, "thetheabab");
}

// If OpenMP workers were left, the loops of the engine would sleep where they should spin, and tokens would take twice
// as long.
TEST_F(Serve, TheCreatingThreadKeepsNoOpenMpWorkers) {
  const auto threads = [] {
    namespace fs = std::filesystem;
    return std::distance(fs::directory_iterator("/proc/self/task"), fs::directory_iterator());
  };
  std::atomic<int> ran = 0;
#pragma omp parallel num_threads(3)
  ++ran;
  if (testing::kSanitized && ran == 1) {
    GTEST_SKIP() << "compiled without OpenMP";
  }
  ASSERT_EQ(ran, 3);
  const auto with_two_workers = threads();
  at::set_num_threads(1);
  const auto model = testing::tiny_model("");
  const Limits limits;
  const Scheduler scheduler(model, EngineOptions{.pages = 16}, limits);
  const auto wanted = with_two_workers - 2 + 1;  // plus the engine's thread
  for (int i = 0; i < 500 && threads() > wanted; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(threads(), wanted);
}

TEST_F(Serve, SeveralChoicesAndPromptsMatchSingleRequests) {
  start({.choices = 6});
  auto body = ask("the cat", 9);
  body["prompt"] = {"the cat", "a dog", "on"};
  body["n"] = 2;
  const auto greedy_ones = answer(body);
  ASSERT_EQ(greedy_ones["choices"].size(), 6U);
  const std::vector<std::string> prompts = {"the cat", "a dog", "on"};
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(greedy_ones["choices"][i]["index"], i);
    EXPECT_EQ(greedy_ones["choices"][i]["text"], greedy(prompts[i / 2], 9)) << i;
  }
  EXPECT_EQ(greedy_ones["usage"],
            (nlohmann::json{{"prompt_tokens", 14}, {"completion_tokens", 54}, {"total_tokens", 68}}));
  body["prompt"] = {{19, 7, 4}, {0, 1}};
  EXPECT_EQ(answer(body)["choices"][3]["text"], greedy("ab", 9)) << "lists of token ids";

  body["prompt"] = {"the cat", "a dog"};
  body["n"] = 3;
  body["temperature"] = 1.5;
  body["seed"] = 7;
  body["logprobs"] = 1;
  const auto sampled = answer(body);
  std::set<std::string> different;
  for (const auto& choice : sampled["choices"]) {
    different.insert(choice["text"].get<std::string>());
    EXPECT_EQ(choice["logprobs"]["tokens"].size(), 9U);
  }
  EXPECT_GT(different.size(), 4U);
  auto alone = body;
  alone["prompt"] = "a dog";
  alone.erase("n");
  EXPECT_EQ(answer(alone)["choices"][0]["text"], sampled["choices"][3]["text"]);

  body["stream"] = true;
  std::vector<std::string> texts(6);
  const auto reply = post(body).body;
  for (size_t at = 0; (at = reply.find("data: {", at)) != std::string::npos; at += 6) {
    const auto json = nlohmann::json::parse(reply.substr(at + 6, reply.find("\n\n", at) - at - 6));
    for (const auto& choice : json["choices"]) {
      texts.at(choice["index"].get<size_t>()) += choice["text"].get<std::string>();
    }
  }
  for (size_t i = 0; i < 6; ++i) EXPECT_EQ(texts[i], sampled["choices"][i]["text"]) << i;
  EXPECT_TRUE(streamed(reply).second);

  body["n"] = 7;
  expect_error(post(body), 400, "n");
  body["n"] = 4;
  expect_error(post(body), 400, "2 prompts, this server allows at most 6 choices");
}

TEST_F(Serve, MoreChoicesThanSequencesAndQueueHoldAreRefused) {
  start({.sequences = 1, .queue = 1});
  auto body = ask("a", 2);
  body["n"] = 3;
  expect_error(post(body), 503, "busy");
  body["n"] = 2;
  EXPECT_EQ(answer(body)["choices"].size(), 2U);
}

// A user's text stays text even if it is spelled like a control token.
TEST_F(Serve, ControlTokensInMessagesAreText) {
  start();
  auto file = nlohmann::json::parse(testing::character_tokenizer(kCharacters));
  file["added_tokens"] = {{{"id", 37},
                           {"content", "(end)"},
                           {"single_word", false},
                           {"lstrip", false},
                           {"rstrip", false},
                           {"normalized", false},
                           {"special", true}}};
  served_->tokenizer = text::Tokenizer::from_json(file.dump(), "test");
  served_->config.vocab_size = 38;
  served_->chat = text::ChatTemplate::parse("{% for m in messages %}{{ m.content }}(end){% endfor %}", "test");
  const auto read = [&](const std::string& content) {
    const nlohmann::json body = {{"model", "tiny"}, {"messages", {{{"role", "user"}, {"content", content}}}}};
    return read_request(body.dump(), Endpoint::kChat, *served_).choices[0].prompt;
  };
  EXPECT_EQ(read("a"), (std::vector<int64_t>{0, 37}));
  const auto at = [](char c) { return static_cast<int64_t>(kCharacters.find(c)); };
  EXPECT_EQ(read("a(end)b"), (std::vector<int64_t>{0, at('('), 4, 13, 3, at(')'), 1, 37}));
  EXPECT_EQ(read("(e(end)"), (std::vector<int64_t>{at('('), 4, at('('), 4, 13, 3, at(')'), 37}));
  const nlohmann::json raw = {{"model", "tiny"}, {"prompt", "a(end)"}};
  EXPECT_EQ(read_request(raw.dump(), Endpoint::kText, *served_).choices[0].prompt, (std::vector<int64_t>{0, 37}))
      << "a prompt is the client's own";
}

TEST(Responses, ToolCallsHaveOpenAisFormat) {
  const testing::TempFolder folder;
  const ServedModel served{
      .name = "bytes", .config = {}, .defaults = {}, .tokenizer = data::make_byte_tokenizer(folder.path()), .chat = {}};
  CompletionRequest request{.choices = {{.prompt = {1}}}, .prompt_tokens = 1, .tools = {"f"}};
  const std::string text = "Well.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>\n";
  const auto give = [&](Response& response) {
    std::vector<Json> chunks;
    for (size_t i = 0; i < text.size(); ++i) {
      AnswerPiece piece{.text = text.substr(i, 1)};
      if (i + 1 == text.size()) piece.finish = Finish::kStop;
      if (auto chunk = response.add(piece)) chunks.push_back(std::move(*chunk));
    }
    EXPECT_TRUE(response.done());
    return chunks;
  };
  Response whole(Endpoint::kChat, "x", served, request);
  give(whole);
  const auto choice = whole.full_response()["choices"][0];
  EXPECT_EQ(choice["finish_reason"], "tool_calls");
  EXPECT_EQ(choice["message"]["content"], "Well.");
  ASSERT_EQ(choice["message"]["tool_calls"].size(), 1U);
  const auto& call = choice["message"]["tool_calls"][0];
  EXPECT_EQ(call["type"], "function");
  EXPECT_EQ(call["function"], Json({{"name", "f"}, {"arguments", "{\"a\":1}"}}));
  EXPECT_EQ(call["id"].get<std::string>().size(), 9U);
  request.stream = true;
  Response stream(Endpoint::kChat, "x", served, request);
  std::string shown;
  Json calls = Json::array();
  const auto chunks = give(stream);
  for (const auto& chunk : chunks) {
    const auto& delta = chunk["choices"][0]["delta"];
    shown += delta.value("content", "");
    if (delta.contains("tool_calls")) calls.insert(calls.end(), delta["tool_calls"].begin(), delta["tool_calls"].end());
  }
  EXPECT_EQ(shown, "Well.");
  ASSERT_EQ(calls.size(), 1U);
  EXPECT_EQ(calls[0]["index"], 0);
  EXPECT_EQ(calls[0]["function"], call["function"]);
  EXPECT_EQ(chunks.back()["choices"][0]["finish_reason"], "tool_calls");
}

TEST_F(Serve, ConcurrentClientsGetTheSameTextAsAlone) {
  start();
  std::vector<std::string> expected, found(24);
  for (int i = 0; i < 24; ++i) expected.push_back(greedy(kCharacters.substr(i % 20, 1 + i % 13), 20 + i % 7));
  std::vector<std::thread> clients;
  for (int i = 0; i < 24; ++i) {
    clients.emplace_back([&, i] {
      auto body = ask(kCharacters.substr(i % 20, 1 + i % 13), 20 + i % 7);
      body["stream"] = i % 2 == 0;
      const auto reply = post(body);
      found[static_cast<size_t>(i)] = i % 2 == 0
                                          ? streamed(reply.body).first
                                          : nlohmann::json::parse(reply.body)["choices"][0]["text"].get<std::string>();
    });
  }
  for (auto& client : clients) client.join();
  EXPECT_EQ(found, expected);
}

TEST_F(Serve, ModelsAndHealthAreReported) {
  start();
  EXPECT_EQ(nlohmann::json::parse(http(port_, "GET", "/v1/models").body)["data"][0]["id"], "tiny");
  EXPECT_EQ(http(port_, "GET", "/v1/models/tiny").status, 200);
  expect_error(http(port_, "GET", "/v1/models/other"), 404, "only the model 'tiny'");
  EXPECT_EQ(nlohmann::json::parse(http(port_, "GET", "/health").body)["status"], "ok");
  const auto head = http(port_, "HEAD", "/health");  // load balancers send HEAD
  EXPECT_EQ(head.status, 200);
  EXPECT_EQ(head.body, "");
  served_->path = "folder/of/tiny";
  EXPECT_EQ(http(port_, "GET", "/v1/models/folder/of/tiny").status, 200);
  auto body = ask("a", 1);
  body["model"] = served_->path;
  EXPECT_EQ(answer(body)["model"], "tiny") << "also called as its server was";
  served_->path.clear();
  body["model"] = "";
  EXPECT_EQ(post(body).status, 404);
}

TEST_F(Serve, InvalidRequestsGetOpenAisErrors) {
  start();
  const auto changed = [](nlohmann::json body, const char* key, nlohmann::json value) {
    body[key] = std::move(value);
    return body;
  };
  const auto good = ask("a", 3);
  expect_error(http(port_, "POST", "/v1/completions", "{\"model\": "), 400, "byte");
  expect_error(http(port_, "POST", "/v1/completions", "[]"), 400, "object");
  expect_error(http(port_, "POST", "/v1/completions", R"({"model": "tiny", "prompt": "a", "temperature": NaN})"), 400,
               "byte");
  expect_error(http(port_, "POST", "/v1/completions", R"({"model": "tiny", "prompt": "a", "temperature": 1e999})"), 400,
               "");
  expect_error(http(port_, "POST", "/v1/completions", std::string(200, '[')), 400, "");
  expect_error(post(changed(good, "temperature", -1)), 400, "temperature");
  expect_error(post(changed(good, "temperature", "hot")), 400, "temperature");
  expect_error(post(changed(good, "max_tokens", 0)), 400, "max_tokens");
  expect_error(post(changed(good, "max_tokens", 1'000'000'000)), 400, "maximum context length is 64 tokens");
  expect_error(post(changed(good, "prompt", std::string(64, 'a'))), 400, "maximum context length is 64 tokens");
  expect_error(post(changed(good, "prompt", "")), 400, "no token");
  expect_error(post(changed(good, "prompt", {1, 37})), 400, "37");
  expect_error(post(changed(good, "prompt", std::vector<std::string>(65, "a"))), 400, "65 prompts");
  expect_error(post(changed(good, "prompt", {"a", 5})), 400, "prompt");
  expect_error(post(changed(good, "prompt", nlohmann::json::array())), 400, "empty list");
  expect_error(post(changed(good, "n", 65)), 400, "n");
  expect_error(post(changed(good, "best_of", 2)), 400, "best_of is not supported");
  expect_error(post(changed(good, "response_format", {{"type", "xml"}})), 400,
               "wanted text, json_object or json_schema");
  expect_error(post(changed(good, "response_format", {{"type", "json_schema"}})), 400, "json_schema");
  expect_error(post(with_schema(good, {{"type", "string"}, {"pattern", "a"}})), 400,
               "response_format.json_schema.schema: found 'pattern'");
  expect_error(post(changed(good, "logit_bias", {{"37", 5}})), 400, "wanted the id of a token, 0 to 36");
  expect_error(post(changed(good, "logit_bias", {{"+1", 5}})), 400, "wanted the id of a token, 0 to 36");
  expect_error(post(changed(good, "logit_bias", {{"1", 100.5}})), 400, "logit_bias");
  expect_error(post(changed(good, "max_tokens", 0)), 400, "max_tokens");
  expect_error(post(changed(good, "temperatur", 1)), 400, "Unrecognized");
  expect_error(post(changed(good, "parallel_tool_calls", false)), 400, "Unrecognized");
  expect_error(post(changed(good, "verbosity", "low")), 400, "verbosity is not supported: found \"low\"");
  expect_error(post(changed(good, "store", true)), 400, "store is not supported");
  expect_error(post(changed(good, "reasoning_effort", "low")), 400, "reasoning_effort is not supported");
  expect_error(post(changed(good, "stream_options", {{"include_usage", true}})), 400, "stream: true");
  expect_error(post(changed(changed(good, "stream", true), "stream_options", {{"include_obfuscation", true}})), 400,
               "'include_obfuscation' is not supported");
  expect_error(post(changed(good, "stop", std::vector<std::string>(17, "x"))), 400, "stop");
  expect_error(post(changed(good, "stop", std::string(2000, 'x'))), 400, "stop");
  expect_error(post(changed(good, "model", "gpt")), 404, "does not exist");
  expect_error(post({{"model", "tiny"}, {"messages", 5}}, "/v1/chat/completions"), 400, "messages");
  expect_error(post({{"model", "tiny"}, {"messages", {{{"role", "user"}, {"content", {{{"type", "image_url"}}}}}}}},
                    "/v1/chat/completions"),
               400, "image_url");
  nlohmann::json tools = {{"model", "tiny"}, {"messages", {{{"role", "user"}, {"content", "a"}}}}, {"tools", {kTool}}};
  tools["tool_choice"] = "must";
  expect_error(post(tools, "/v1/chat/completions"), 400, "tool_choice: found \"must\"");
  tools["tool_choice"] = {{"type", "function"}, {"function", {{"name", "g"}}}};
  expect_error(post(tools, "/v1/chat/completions"), 400, "the name of one of the tools");
  expect_error(post(changed({{"messages", tools["messages"]}}, "tool_choice", "required"), "/v1/chat/completions"), 400,
               "there are no tools");
  tools["tool_choice"] = "required";
  tools["tools"][0]["function"]["parameters"] = {{"type", "object"}, {"minProperties", 1}};
  expect_error(post(tools, "/v1/chat/completions"), 400, "found 'minProperties'");
  tools["tools"] = {kTool};
  tools["tool_choice"] = "auto";
  tools["tools"][0]["type"] = "computer";
  expect_error(post(tools, "/v1/chat/completions"), 400, "computer");
  tools["tools"] = 5;
  expect_error(post(tools, "/v1/chat/completions"), 400, "tools");
  expect_error(http(port_, "GET", "/v1/completions"), 405, "needs the method POST");
  expect_error(http(port_, "GET", "/nothing"), 404, "No such path");
  expect_error(http(port_, "POST", "/v1/completions", good.dump(), "Content-Type: text/plain\r\n"), 415,
               "application/json");
  expect_error(http(port_, "POST", "/v1/completions", good.dump(), "Content-Type: application/jsonl\r\n"), 415,
               "application/json");
  for (const char* type : {"Application/JSON", "application/json;charset=utf-8", "application/json ; charset=UTF-8"}) {
    EXPECT_EQ(http(port_, "POST", "/v1/completions", good.dump(), fmt::format("Content-Type: {}\r\n", type)).status,
              200)
        << type;
  }
  EXPECT_EQ(answer(changed(good, "n", 1))["choices"].size(), 1U) << "and goes on";
  auto unnamed = good;
  unnamed.erase("model");
  EXPECT_EQ(answer(unnamed)["model"], "tiny") << "there is but one";
}

TEST_F(Serve, RequestLimitsAreEnforced) {
  start({.body_bytes = 1000, .header_bytes = 4096, .header_seconds = 1, .read_seconds = 1});
  expect_error(http(port_, "POST", "/v1/completions", std::string(1001, ' ')), 413, "1001 bytes");
  const auto chunked = testing::connect_to(port_);
  testing::send_all(
      chunked.get(),
      "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n");
  expect_error(testing::parse_reply(testing::read_all(chunked.get())), 411, "Content-Length");
  const auto both =
      http(port_, "POST", "/v1/completions", "{}", "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n");
  expect_error(both, 411, "Transfer-Encoding");
  const auto get = testing::connect_to(port_);
  testing::send_all(get.get(),
                    "GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3000\r\n\r\n" + std::string(3000, 'x'));
  EXPECT_NE(testing::parse_reply(testing::read_all(get.get())).status, 200) << "a body is limited wherever it comes";
  const auto large = http(port_, "GET", "/health", "", "X: " + std::string(100'000, 'x') + "\r\n");
  EXPECT_TRUE(large.status == 431 || large.status == 0) << large.head;
  // One client does not finish its header, the other one does not finish its body.
  const auto begin = std::chrono::steady_clock::now();
  const auto header = testing::connect_to(port_), body = testing::connect_to(port_);
  testing::send_all(header.get(), "GET /health HTTP/1.1\r\nHo");
  testing::send_all(body.get(),
                    "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
                    "application/json\r\nContent-Length: 90\r\n\r\n{");
  EXPECT_EQ(testing::parse_reply(testing::read_all(header.get())).status / 100 * 100 % 400, 0);
  testing::read_all(body.get());
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  EXPECT_EQ(http(port_, "GET", "/health").status, 200);
}

TEST_F(Serve, ABearerTokenIsRequiredIfOneIsSet) {
  start({}, "0123456789abcdef");
  const auto with = [&](const std::string& value) {
    return http(port_, "POST", "/v1/completions", ask("a", 2).dump(),
                "Content-Type: application/json\r\nAuthorization: " + value + "\r\n");
  };
  expect_error(post(ask("a", 2)), 401, "token");
  expect_error(with("Bearer 0123456789abcdeX"), 401, "token");
  expect_error(with("Bearer 0123456789abcde"), 401, "token");
  expect_error(with("Bearer 0123456789abcdef0"), 401, "token");
  expect_error(with("Basic 0123456789abcdef"), 401, "token");
  expect_error(with("Bearer"), 401, "token");
  expect_error(with("Bearer0123456789abcdef"), 401, "token");
  for (const char* good : {"Bearer 0123456789abcdef", "bearer 0123456789abcdef", "BEARER  0123456789abcdef"}) {
    EXPECT_EQ(with(good).status, 200) << good;
  }
}

TEST_F(Serve, WithoutATokenABrowserPageIsRefused) {
  start();
  const auto socket = testing::connect_to(port_);
  testing::send_all(socket.get(), "GET /v1/models HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n");
  expect_error(testing::parse_reply(testing::read_all(socket.get())), 403, "localhost");
}

TEST_F(Serve, AFullQueueRefusesRequestsAndADisconnectedClientFreesItsPlace) {
  start({.sequences = 1, .queue = 1}, "", kLongContext);
  auto body = ask("a", 4000);
  body["ignore_eos"] = true;
  body["stream"] = true;
  const auto request =
      "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: " +
      std::to_string(body.dump().size()) + "\r\n\r\n" + body.dump();
  auto running = testing::connect_to(port_), waiting = testing::connect_to(port_);
  testing::send_all(running.get(), request);
  testing::send_all(waiting.get(), request);
  for (int i = 0; i < 200 && scheduler_->counts().running + scheduler_->counts().waiting < 2; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  expect_error(post(ask("a", 2)), 503, "busy");
  running.reset();
  waiting.reset();
  EXPECT_TRUE(becomes_idle());
  EXPECT_LT(scheduler_->counts().new_tokens, 7000);
  EXPECT_EQ(post(ask("a", 2)).status, 200);
}

TEST_F(Serve, ADisconnectedClientWithUnreadDataFreesItsPlace) {
  start({}, "", kLongContext);
  auto body = ask("a", 4000);
  body["ignore_eos"] = true;
  auto socket = testing::connect_to(port_);
  testing::send_all(socket.get(),
                    "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
                    "application/json\r\nContent-Length: " +
                        std::to_string(body.dump().size()) + "\r\n\r\n" + body.dump() + "GET /health HTTP/1.1\r\n");
  while (scheduler_->counts().new_tokens < 3) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  socket.reset();
  EXPECT_TRUE(becomes_idle());
  EXPECT_LT(scheduler_->counts().new_tokens, 4000);
}

TEST_F(Serve, DrainingCompletesCurrentRequestsAndRefusesNewOnes) {
  start({}, "", kLongContext);
  auto body = ask("the cat", 300);
  body["ignore_eos"] = true;
  std::string text;
  std::thread client([&] { text = answer(body)["choices"][0]["text"]; });
  while (scheduler_->counts().new_tokens < 3) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  EXPECT_TRUE(server_->drain());
  client.join();
  EXPECT_EQ(text, greedy("the cat", 300));
  EXPECT_LT(testing::connect_to(port_).get(), 0);
}

}  // namespace
}  // namespace tessera::serve
