// Normal clients must get complete answers beside hostile clients. hostile_clients_slow_test.cc has 64 clients, a real
// model and a longer time.
#include <gtest/gtest.h>

#include "tests/serve/serve_fixture.h"
#include "tests/serve/with_hostile_clients.h"

namespace tessera::serve {
namespace {

TEST_F(Serve, NormalClientsGetCompleteResponsesDespiteHostileClients) {
  start({}, "", R"("max_position_embeddings": 512)", kJsonCharacters);
  std::vector<std::string> prompts, expected;
  for (size_t i = 0; i < 16; ++i) prompts.push_back(kJsonCharacters.substr(i, 3 + i % 5));
  for (const auto& prompt : prompts) expected.push_back(greedy(prompt, 12));
  const testing::HostileClients hostile(port_, {.silent_connections = 256, .every = 2});
  for (int round = 0; round < 2; ++round) EXPECT_EQ(testing::answers_to(port_, prompts, 12), expected);
}

}  // namespace
}  // namespace tessera::serve
