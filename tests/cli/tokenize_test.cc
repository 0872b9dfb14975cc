// `tessera tokenize`: text to ids and back, and its errors.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera {
namespace {

using testing::asset;
using ::testing::HasSubstr;
using testing::program;
using testing::run_process;

testing::ProcessResult tokenize(const std::string& input, std::vector<std::string> flags = {}) {
  flags.insert(flags.begin(), {program(), "tokenize", "--model", asset("smollm2").string()});
  testing::ProcessOptions options;
  options.input = input;
  return run_process(flags, options);
}

TEST(Tokenize, LinesAndIdsRoundTrip) {
  const std::string text = "In the beginning\n\n  caf\xc3\xa9 123 <|im_end|>\nno newline at the end";
  const auto ids = tokenize(text);
  ASSERT_EQ(ids.exit_code, 0) << ids.err;
  EXPECT_EQ(std::ranges::count(ids.out, '\n'), 4);
  const auto back = tokenize(ids.out, {"--decode"});
  ASSERT_EQ(back.exit_code, 0) << back.err;
  EXPECT_EQ(back.out, text + "\n");
  EXPECT_THAT(tokenize(ids.out, {"--decode", "--no-special"}).out, ::testing::Not(HasSubstr("<|im_end|>")));
  EXPECT_NE(tokenize(text, {"--no-special"}).out, ids.out);  // the marker is plain text
}

TEST(Tokenize, ErrorsOfInvalidIdsNameTheLine) {
  for (const char* wrong : {"1 2\n3 x\n", "1\n-1\n", "1\n99999999\n", "1\n99999999999999999999\n"}) {
    const auto run = tokenize(wrong, {"--decode"});
    EXPECT_EQ(run.exit_code, 3) << run.err;
    EXPECT_THAT(run.err, HasSubstr("stdin line 2: found '"));
  }
}

TEST(Tokenize, MissingFlagOrFolderIsAnError) {
  const auto flag = run_process({program(), "tokenize"});
  EXPECT_EQ(flag.exit_code, 2);
  EXPECT_THAT(flag.err, HasSubstr("--model"));
  testing::TempFolder empty;
  const auto folder = run_process({program(), "tokenize", "--model", empty.path().string()});
  EXPECT_EQ(folder.exit_code, 3);
  EXPECT_THAT(folder.err, HasSubstr("tokenizer.json"));
}

}  // namespace
}  // namespace tessera
