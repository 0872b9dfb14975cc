// The official OpenAI client and curl against `tessera serve`. The server is a process of its own with a tiny model.
#include <gtest/gtest.h>

#include "tests/serve/tiny_folder.h"
#include "tests/support/process.h"

namespace tessera::serve {
namespace {

void expect_served(const std::vector<std::string>& flags) {
  const testing::TinyFolder folder;
  std::vector<std::string> arguments = {testing::program(), folder.path().string(), "16", "2"};
  arguments.insert(arguments.end(), flags.begin(), flags.end());
  const auto run = testing::run_python("tests/serve/oracle/openai_oracle.py", arguments, {.timeout_seconds = 300});
  EXPECT_EQ(run.exit_code, 0) << run.out << run.err;
}

TEST(OpenAiClient, ReadsResponsesAndConcurrentClientsGetTheTokensOfGenerate) { expect_served({}); }

TEST(OpenAiClient, ReadsResponsesOfTwoRanks) { expect_served({"--nproc", "2"}); }

}  // namespace
}  // namespace tessera::serve
