// Keys of requests that have no effect, that are null, or that change the format of an answer.
#include <gtest/gtest.h>

#include "tessera/serve/responses.h"
#include "tests/data/byte_tokenizer.h"
#include "tests/serve/serve_fixture.h"
#include "tests/support/temp_folder.h"

namespace tessera::serve {
namespace {

// All optional keys of OpenAI's two APIs, and Tessera's own keys.
TEST_F(Serve, ANullCountsAsAnAbsentKey) {
  start();
  auto body = ask("the cat", 6);
  const auto text = answer(body)["choices"][0];
  for (const char* key : {"model",
                          "stream",
                          "stream_options",
                          "top_p",
                          "top_k",
                          "min_p",
                          "seed",
                          "stop",
                          "n",
                          "presence_penalty",
                          "frequency_penalty",
                          "repetition_penalty",
                          "logprobs",
                          "logit_bias",
                          "ignore_eos",
                          "response_format",
                          "echo",
                          "best_of",
                          "suffix",
                          "user",
                          "store",
                          "metadata",
                          "service_tier",
                          "prompt_cache_key",
                          "safety_identifier"}) {
    auto with = body;
    with[key] = nullptr;
    EXPECT_EQ(answer(with)["choices"][0], text) << key;
  }
  body["temperature"] = nullptr;
  body["max_tokens"] = nullptr;
  EXPECT_EQ(answer(body)["usage"]["completion_tokens"], 16) << "the default";
  body["prompt"] = nullptr;
  expect_error(post(body), 400, "prompt");

  nlohmann::json chat = {{"messages", {{{"role", "user"}, {"content", "hi"}}}}, {"max_tokens", 6}, {"temperature", 0}};
  const auto path = "/v1/chat/completions";
  const auto said = answer(chat, path)["choices"][0];
  for (const char* key : {"model",
                          "stream",
                          "stream_options",
                          "top_p",
                          "seed",
                          "stop",
                          "n",
                          "presence_penalty",
                          "frequency_penalty",
                          "logprobs",
                          "top_logprobs",
                          "logit_bias",
                          "response_format",
                          "max_completion_tokens",
                          "tools",
                          "tool_choice",
                          "parallel_tool_calls",
                          "chat_template_kwargs",
                          "functions",
                          "function_call",
                          "audio",
                          "prediction",
                          "modalities",
                          "reasoning_effort",
                          "verbosity",
                          "web_search_options",
                          "user",
                          "store",
                          "metadata",
                          "service_tier"}) {
    auto with = chat;
    with[key] = nullptr;
    EXPECT_EQ(answer(with, path)["choices"][0], said) << key;
  }
  chat["stream"] = true;
  chat["stream_options"] = {{"include_usage", nullptr}, {"include_obfuscation", nullptr}};
  EXPECT_TRUE(streamed(post(chat, path).body).second);
}

TEST_F(Serve, InAStreamOnlyTheLastChunkHasUsageNumbers) {
  start();
  nlohmann::json body = {{"messages", {{{"role", "user"}, {"content", "hi"}}}},
                         {"max_tokens", 4},
                         {"stream", true},
                         {"n", 2},
                         {"stream_options", {{"include_usage", true}}}};
  for (const bool chat : {true, false}) {
    const auto reply = chat ? post(body, "/v1/chat/completions").body : post(body).body;
    std::vector<nlohmann::json> chunks;
    for (size_t at = 0; (at = reply.find("data: {", at)) != std::string::npos; at += 6) {
      chunks.push_back(nlohmann::json::parse(reply.substr(at + 6, reply.find("\n\n", at) - at - 6)));
    }
    ASSERT_GT(chunks.size(), 5U) << reply;
    for (const auto& chunk : chunks) {
      ASSERT_TRUE(chunk.contains("usage")) << chunk;
      const bool is_last = chunk == chunks.back();
      EXPECT_EQ(chunk["usage"].is_null(), !is_last) << chunk;
      EXPECT_EQ(chunk["choices"].empty(), is_last);
    }
    body.erase("messages");
    body["prompt"] = "the cat";
  }
  body["stream_options"] = {{"include_usage", false}};
  EXPECT_EQ(post(body).body.find("usage"), std::string::npos);
}

// The texts have two calls, with text between and after them.
TEST(Responses, WithoutParallelToolCallsAResponseEndsAfterTheFirstCall) {
  const testing::TempFolder folder;
  const ServedModel served{
      .name = "bytes", .config = {}, .defaults = {}, .tokenizer = data::make_byte_tokenizer(folder.path()), .chat = {}};
  const auto choice_of = [&](const std::string& text, bool one_tool_call, bool stream) {
    CompletionRequest request{.choices = {{.prompt = {1}}}, .prompt_tokens = 1, .tools = {"f", "g"}};
    request.one_tool_call = one_tool_call;
    request.stream = stream;
    Response response(Endpoint::kChat, "x", served, request);
    Json joined = {{"content", ""}, {"tool_calls", Json::array()}, {"finish_reason", nullptr}};
    for (size_t i = 0; i < text.size(); ++i) {
      AnswerPiece piece{.text = text.substr(i, 1), .token = 1};
      if (i + 1 == text.size()) piece.finish = Finish::kStop;
      const auto chunk = response.add(piece);
      if (!chunk) continue;
      const auto& choice = (*chunk)["choices"][0];
      EXPECT_TRUE(joined["finish_reason"].is_null()) << "nothing comes behind the end";
      joined["content"] = joined["content"].get<std::string>() + choice["delta"].value("content", "");
      if (choice["delta"].contains("tool_calls")) {
        for (const auto& call : choice["delta"]["tool_calls"]) joined["tool_calls"].push_back(call);
      }
      joined["finish_reason"] = choice["finish_reason"];
    }
    EXPECT_TRUE(response.done());
    if (stream) return joined;
    auto choice = response.full_response()["choices"][0];
    return Json({{"content", choice["message"]["content"]},
                 {"tool_calls", choice["message"]["tool_calls"]},
                 {"finish_reason", choice["finish_reason"]}});
  };
  const std::string tagged =
      "Well.<tool_call>{\"name\": \"f\"}</tool_call> And <tool_call>{\"name\": \"g\"}</tool_call>Done.";
  const std::string list = "[{\"name\": \"f\", \"arguments\": {}}, {\"name\": \"g\", \"arguments\": {}}]";
  for (const bool stream : {false, true}) {
    for (const auto& text : {tagged, list}) {
      const auto one = choice_of(text, true, stream), all = choice_of(text, false, stream);
      ASSERT_EQ(one["tool_calls"].size(), 1U) << one;
      EXPECT_EQ(one["tool_calls"][0]["function"]["name"], "f");
      EXPECT_EQ(one["finish_reason"], "tool_calls");
      EXPECT_EQ(all["tool_calls"].size(), 2U) << all;
    }
    EXPECT_EQ(choice_of(tagged, true, stream)["content"], "Well.");
    EXPECT_EQ(choice_of("No call.", true, stream)["content"], "No call.");
    EXPECT_EQ(choice_of("No call.", true, stream)["finish_reason"], "stop");
  }
}

TEST_F(Serve, ParallelToolCallsIsRead) {
  start();
  nlohmann::json body = {{"messages", {{{"role", "user"}, {"content", "hi"}}}}, {"tools", {kTool}}};
  const auto read = [&] { return read_request(body.dump(), Endpoint::kChat, *served_).one_tool_call; };
  EXPECT_FALSE(read());
  body["parallel_tool_calls"] = false;
  EXPECT_TRUE(read());
  body["parallel_tool_calls"] = true;
  EXPECT_FALSE(read());
  body["parallel_tool_calls"] = "no";
  expect_error(post(body, "/v1/chat/completions"), 400, "parallel_tool_calls");
}

TEST_F(Serve, AStoppedChoiceFreesItsSequenceWhileOthersRun) {
  start({}, "", kLongContext);
  StepGate gate(*rows_);
  auto body = ask("a", 3000);
  body["n"] = 2;
  const auto request = read_request(body.dump(), Endpoint::kText, *served_);
  const auto taken = scheduler_->submit(request, served_->tokenizer);
  gate.let_through(2);
  std::optional<AnswerPiece> piece;
  for (int i = 0; i < 100 && !piece; ++i) piece = taken->next(std::chrono::milliseconds(100));
  ASSERT_TRUE(piece);
  taken->stop(0);
  gate.let_through(3);
  for (int i = 0; i < 500 && scheduler_->counts().running != 1; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  EXPECT_EQ(scheduler_->counts().running, 1);
  taken->cancel();
  gate.let_through(100);
  EXPECT_TRUE(becomes_idle());
}

}  // namespace
}  // namespace tessera::serve
