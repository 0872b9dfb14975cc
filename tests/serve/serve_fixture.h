// A server over real sockets, with a tiny random model.
//
//   TEST_F(Serve, Greets) {
//     start({.sequences = 4});
//     EXPECT_EQ(answer(ask("the cat", 20))["choices"][0]["text"], greedy("the cat", 20));
//   }
#pragma once

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/models/generation/row_model.h"
#include "tessera/serve/server.h"
#include "tests/cli/tiny_tokenizer.h"
#include "tests/models/tiny.h"
#include "tests/support/http_client.h"

namespace tessera::serve {

inline const std::string kCharacters = "abcdefghijklmnopqrstuvwxyz .,:;!?()'-";
inline const std::string kJsonCharacters = "abcdefghijklmnopqrstuvwxyz {}[]\":,-1_";
inline const std::string kTemplate =
    "{% for m in messages %}{{ m.role }}: {{ m.content }}. {% endfor %}{% if tools %}tools{% endif %}";
inline const nlohmann::json kTool = {{"type", "function"}, {"function", {{"name", "f"}}}};

// A setting for sequences of 3,900 tokens and more, which run longer than a test.
inline const std::string kLongContext = R"("max_position_embeddings": 4096)";

class Serve : public ::testing::Test {
 protected:
  void start(const Limits& limits = {}, const std::string& token = "", const std::string& changes = "",
             const std::string& characters = kCharacters) {
    at::set_num_threads(1);  // also the engine's thread
    model_ = testing::tiny_model(changes);
    rows_ = testing::tiny_model(changes);
    make_row_model(*rows_, kernels::WeightFormat::kFloat32);
    served_ = std::make_unique<ServedModel>(
        ServedModel{.name = "tiny",
                    .config = model_->config(),
                    .defaults = {},
                    .tokenizer = text::Tokenizer::from_json(testing::character_tokenizer(characters), "test"),
                    .chat = text::ChatTemplate::parse(kTemplate, "test"),
                    .cache_tokens = 4096,
                    .limits = limits});
    scheduler_ =
        std::make_unique<Scheduler>(rows_, EngineOptions{.pages = 256, .max_sequences = limits.sequences}, limits);
    auto listening = listen_at("127.0.0.1", 0, ListenScope::kThisHost);
    port_ = listening.port;
    server_ = std::make_unique<Server>(*served_, *scheduler_, ServerOptions{std::move(listening), token});
  }
  testing::HttpReply post(const nlohmann::json& body, const std::string& path = "/v1/completions") const {
    return testing::http(port_, "POST", path, body.dump());
  }
  nlohmann::json answer(const nlohmann::json& body, const std::string& path = "/v1/completions") const {
    const auto reply = post(body, path);
    EXPECT_EQ(reply.status, 200) << reply.body;
    return nlohmann::json::parse(reply.body);
  }
  void expect_error(const testing::HttpReply& reply, int status, const std::string& part) const {
    EXPECT_EQ(reply.status, status) << reply.head << "\n" << reply.body;
    const auto json = nlohmann::json::parse(reply.body, nullptr, false);
    ASSERT_TRUE(json.is_object()) << reply.body;
    EXPECT_NE(json["error"]["message"].get<std::string>().find(part), std::string::npos) << reply.body;
    EXPECT_TRUE(json["error"]["type"].is_string());
  }
  std::string greedy(const std::string& prompt, int64_t count) const {
    const auto ids = served_->tokenizer.encode(prompt);
    const std::vector<int64_t> tokens(ids.begin(), ids.end());
    const auto made = generate(*model_, tokens, {.max_new_tokens = count});
    const std::vector<text::TokenId> back(made.begin(), made.end());
    return served_->tokenizer.decode(back);
  }
  // Waits until the scheduler has no sequence.
  bool becomes_idle() const {
    for (int i = 0; i < 500; ++i) {
      const auto counts = scheduler_->counts();
      if (counts.running + counts.waiting == 0) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return false;
  }
  static nlohmann::json ask(const std::string& prompt, int64_t count) {
    return {{"model", "tiny"}, {"prompt", prompt}, {"max_tokens", count}, {"temperature", 0}};
  }

  std::shared_ptr<CausalLM> model_, rows_;  // for expected texts; for the server
  std::unique_ptr<ServedModel> served_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<Server> server_;
  int port_ = 0;
};

// The joined text of the chunks of a stream, and whether [DONE] has arrived.
inline std::pair<std::string, bool> streamed(const std::string& body) {
  std::string text;
  bool done = false;
  for (size_t at = 0; (at = body.find("data: ", at)) != std::string::npos;) {
    at += 6;
    const auto event = body.substr(at, body.find("\n\n", at) - at);
    done = done || event == "[DONE]";
    const auto json = nlohmann::json::parse(event, nullptr, false);
    if (!json.is_object() || !json.contains("choices") || json["choices"].empty()) continue;
    const auto& choice = json["choices"][0];
    text += choice.contains("text") ? choice["text"].get<std::string>() : choice["delta"].value("content", "");
  }
  return {text, done};
}

// Lets the model of a server compute a number of steps and then blocks it.
//
//   StepGate gate(*rows_);       // before the first request
//   gate.let_through(3);
class StepGate {
 public:
  explicit StepGate(CausalLM& model) {
    model.register_forward_pre_hook([state = state_](auto&&...) {
      std::unique_lock lock(state->mutex);
      state->wake.wait(lock, [&] { return state->steps > 0; });
      --state->steps;
    });
  }
  ~StepGate() { let_through(1'000'000'000); }
  StepGate(const StepGate&) = delete;
  StepGate& operator=(const StepGate&) = delete;
  void let_through(int64_t steps) {
    const std::lock_guard lock(state_->mutex);
    state_->steps += steps;
    state_->wake.notify_all();
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable wake;
    int64_t steps = 0;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace tessera::serve
