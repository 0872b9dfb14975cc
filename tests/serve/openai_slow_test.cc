// 64 clients of the OpenAI API at once for a minute, on a tiny model and on SmolLM2. No answer may have a wrong byte.
#include <gtest/gtest.h>

#include "tests/serve/tiny_folder.h"
#include "tests/support/process.h"

namespace tessera::serve {
namespace {

TEST(ManyClients, SixtyFourForAMinuteGetCorrectResponses) {
  const testing::TinyFolder folder;
  for (const auto& model : {folder.path().string(), testing::asset("smollm2").string()}) {
    const auto run = testing::run_python("tests/serve/oracle/openai_oracle.py", {testing::program(), model, "64", "60"},
                                         {.timeout_seconds = 1000});
    EXPECT_EQ(run.exit_code, 0) << model << "\n" << run.out << run.err;
    std::printf("%s: %s", model.c_str(), run.out.c_str());
  }
}

}  // namespace
}  // namespace tessera::serve
