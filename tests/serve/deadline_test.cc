// Requests that take longer than the server allows, and clients that close their sending side or leave.
#include <gtest/gtest.h>

#include "tests/serve/serve_fixture.h"

namespace tessera::serve {
namespace {

TEST_F(Serve, AtTheDeadlineAResponseHasTheTextGeneratedSoFar) {
  start({.request_seconds = 1});
  StepGate gate(*rows_);
  const auto text = greedy("the cat", 20);
  auto body = ask("the cat", 20);
  // The last characters of the text may begin a stop string. The server holds them back until the deadline.
  body["stop"] = text.substr(3, 2) + "123";
  gate.let_through(5);  // the prompt's step, which makes the first token, and four steps
  const auto whole = answer(body);
  EXPECT_EQ(whole["choices"][0]["text"], text.substr(0, 5));
  EXPECT_EQ(whole["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(whole["usage"]["completion_tokens"], 5);
  body["stream"] = true;
  body["stream_options"] = {{"include_usage", true}};
  gate.let_through(6);  // one step more, which ends the previous request
  const auto reply = post(body).body;
  EXPECT_EQ(streamed(reply), std::pair(text.substr(0, 5), true));
  EXPECT_NE(reply.find(R"("finish_reason":"length")"), std::string::npos) << reply;
  EXPECT_NE(reply.find(R"("completion_tokens":5)"), std::string::npos) << reply;
  gate.let_through(1000);
  EXPECT_TRUE(becomes_idle());
  body.erase("stream");
  body.erase("stream_options");
  EXPECT_EQ(answer(body)["choices"][0]["text"], text) << "and the server goes on";
}

TEST_F(Serve, ARequestWithoutATokenAtItsDeadlineGets504) {
  start({.request_seconds = 0.4});
  StepGate gate(*rows_);
  auto body = ask("the cat", 20);
  expect_error(post(body), 504, "longer than this server allows");
  body["n"] = 2;
  body["stream"] = true;
  const auto reply = post(body).body;
  EXPECT_NE(reply.find("longer than this server allows"), std::string::npos) << reply;
  EXPECT_FALSE(streamed(reply).second);
  gate.let_through(1000);
  EXPECT_TRUE(becomes_idle());
}

// A choice without a token at the deadline is empty.
TEST_F(Serve, ChoicesThatHaveNotBegunAtTheDeadlineAreEmpty) {
  start({.sequences = 1, .request_seconds = 1});
  StepGate gate(*rows_);
  auto body = ask("the cat", 20);
  body["n"] = 2;
  body["echo"] = true;
  body["logprobs"] = 1;
  gate.let_through(3);
  const auto found = answer(body);
  EXPECT_EQ(found["choices"][0]["text"], "the cat" + greedy("the cat", 3));
  EXPECT_EQ(found["choices"][1]["text"], "the cat");
  for (const auto& choice : found["choices"]) {
    EXPECT_EQ(choice["finish_reason"], "length");
    for (const auto& list : choice["logprobs"]) EXPECT_EQ(list.size(), choice["logprobs"]["tokens"].size()) << choice;
  }
  gate.let_through(1000);
}

std::string request_text(const nlohmann::json& body, const std::string& version = "HTTP/1.1") {
  const auto text = body.dump();
  return fmt::format(
      "POST /v1/completions {}\r\nHost: localhost\r\nConnection: close\r\nContent-Type: "
      "application/json\r\nContent-Length: {}\r\n\r\n{}",
      version, text.size(), text);
}

// The client behaves like `printf 'POST ...' | nc -N`.
TEST_F(Serve, AClientThatClosesItsSendingSideGetsAResponse) {
  start();
  StepGate gate(*rows_);
  auto body = ask("the cat", 12);
  const auto text = greedy("the cat", 12);
  for (const bool stream : {false, true}) {
    for (const char* version : {"HTTP/1.1", "HTTP/1.0"}) {
      body["stream"] = stream;
      const auto socket = testing::connect_to(port_);
      testing::send_all(socket.get(), request_text(body, version));
      ::shutdown(socket.get(), SHUT_WR);
      // Longer than the interval at which the server checks its client.
      std::this_thread::sleep_for(std::chrono::milliseconds(700));
      gate.let_through(12);
      auto reply = testing::read_all(socket.get());
      const std::string interim = "HTTP/1.1 100 Continue\r\n\r\n";
      const bool has_interim = reply.starts_with(interim);
      EXPECT_EQ(has_interim, !stream && std::string(version) == "HTTP/1.1") << "an older client would not skip it";
      if (has_interim) reply.erase(0, interim.size());
      const auto parsed = testing::parse_reply(reply);
      EXPECT_EQ(parsed.status, 200) << version << "\n" << reply;
      const auto found = stream ? streamed(parsed.body).first
                                : nlohmann::json::parse(parsed.body)["choices"][0]["text"].get<std::string>();
      EXPECT_EQ(found, text) << version;
    }
  }
}

TEST_F(Serve, AClientThatDisconnectsWhileQueuedFreesItsPlace) {
  start({.sequences = 1});
  StepGate gate(*rows_);
  auto body = ask("the cat", 12);
  for (const bool stream : {false, true}) {
    body["stream"] = stream;
    const auto before = scheduler_->counts().new_tokens;
    auto running = testing::connect_to(port_), waiting = testing::connect_to(port_);
    testing::send_all(running.get(), request_text(body));
    while (scheduler_->counts().running + scheduler_->counts().waiting < 1) std::this_thread::yield();
    testing::send_all(waiting.get(), request_text(body));
    while (scheduler_->counts().running + scheduler_->counts().waiting < 2) std::this_thread::yield();
    if (stream) {  // reads the first chunk, because unread data would reset the connection
      char chunk[4096];
      EXPECT_GT(::recv(waiting.get(), chunk, sizeof chunk, 0), 0);
    }
    waiting.reset();
    std::this_thread::sleep_for(std::chrono::milliseconds(700));
    gate.let_through(12);
    EXPECT_NE(testing::read_all(running.get()).find("200 OK"), std::string::npos);
    EXPECT_TRUE(becomes_idle());
    EXPECT_LE(scheduler_->counts().new_tokens - before, 12) << "no token was made for the one that left";
  }
}

}  // namespace
}  // namespace tessera::serve
