// The official OpenAI client and curl against `tessera serve`, a process of its own on a tiny model.
#include <gtest/gtest.h>

#include "tests/serve/tiny_folder.h"
#include "tests/support/process.h"

namespace tessera::serve {
namespace {

TEST(OpenAiClient, ReadsWhatIsServedAndManyAtOnceGetTheTokensOfGenerate) {
  const testing::TinyFolder folder;
  const auto run =
      testing::run_python("tests/serve/oracle/openai_oracle.py",
                          {testing::program(), folder.path().string(), "16", "2"}, {.timeout_seconds = 300});
  EXPECT_EQ(run.exit_code, 0) << run.out << run.err;
}

}  // namespace
}  // namespace tessera::serve
