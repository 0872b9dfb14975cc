// 64 clients for a minute beside hostile clients, on SmolLM2: every normal client must get complete answers.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <set>

#include "tessera/models/generation/load.h"
#include "tessera/serve/server.h"
#include "tests/serve/with_hostile_clients.h"
#include "tests/support/process.h"

namespace tessera::serve {
namespace {

TEST(HostileClients, SixtyFourNormalClientsGetCompleteResponsesForAMinute) {
  const auto folder = testing::asset("smollm2");
  const auto model = load_for_generation(folder, "int8", at::kCPU);
  const Limits limits;
  const ServedModel served{.name = "smollm2",
                           .config = model->config(),
                           .defaults = {},
                           .tokenizer = text::Tokenizer::from_folder(folder),
                           .chat = text::ChatTemplate::from_folder(folder),
                           .cache_tokens = 65536,
                           .limits = limits};
  Scheduler scheduler(model, {.pages = Engine::pages_for(65536), .max_sequences = limits.sequences}, limits);
  auto listening = listen_at("127.0.0.1", 0, ListenScope::kThisHost);
  const int port = listening.port;
  const Server server(served, scheduler, {.listening = std::move(listening)});
  std::vector<std::string> prompts;
  for (int i = 0; i < 64; ++i) prompts.push_back(fmt::format("The number {} is", i));
  const auto expected = testing::answers_to(port, prompts, 12);
  ASSERT_GT(std::set<std::string>(expected.begin(), expected.end()).size(), 16U);
  const testing::HostileClients hostile(port, {.silent_connections = 256});
  const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  int rounds = 0;
  for (; std::chrono::steady_clock::now() < end; ++rounds) ASSERT_EQ(testing::answers_to(port, prompts, 12), expected);
  std::printf("%d complete answers to 64 clients\n", rounds * 64);
}

}  // namespace
}  // namespace tessera::serve
