// The tables of measured figures in the documents must equal the tables that scripts/bench_table.py makes from the
// results.
#include <gtest/gtest.h>

#include "tests/support/process.h"

namespace tessera {
namespace {

TEST(BenchTables, MatchTheResults) {
  const auto script = (testing::source_folder() / "scripts" / "bench_table.py").string();
  const auto run = testing::run_process({"python3", script, "--check"});
  EXPECT_EQ(run.exit_code, 0) << run.err;
}

}  // namespace
}  // namespace tessera
