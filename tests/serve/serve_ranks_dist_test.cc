// `tessera serve --nproc`: if a rank dies, the server ends on all ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/serve/tiny_folder.h"
#include "tests/support/process.h"

namespace tessera::serve {
namespace {

using ::testing::HasSubstr;

TEST(ServeRanks, ARankThatDiesEndsAllRanks) {
  const testing::TinyFolder folder;
  const testing::TempFolder temp;
  const auto run = testing::run_process(
      {"bash", "-c",
       "\"$1\" serve --model \"$2\" --port 0 --nproc 2 2>\"$3/err\" & launcher=$!\n"
       "for i in $(seq 300); do grep -q ' at http' \"$3/err\" && break; sleep 0.1; done\n"
       "for child in $(cat /proc/$launcher/task/*/children); do\n"
       "  tr '\\0' '\\n' <\"/proc/$child/environ\" | grep -qx RANK=1 && kill -9 $child && echo killed\n"
       "done\n"
       "wait $launcher; echo \"code $?\"; cat \"$3/err\" >&2",
       "-", testing::program(), folder.path().string(), temp.path().string()});
  EXPECT_EQ(run.exit_code, 0) << "in time: " << run.err;
  EXPECT_EQ(run.out, "killed\ncode 137\n") << "as of the rank that ended first: 128 + SIGKILL";
  EXPECT_THAT(run.err, HasSubstr("2 ranks"));
  EXPECT_THAT(run.err, HasSubstr("rank 1 of 2: ended by signal 9"));
}

}  // namespace
}  // namespace tessera::serve
