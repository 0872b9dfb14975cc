// Tests of the examples: they are built as a user builds them, against the installed library, and run on several ranks.
#include <gmock/gmock.h>

#include <string>

#include "tests/examples/installed.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

// The loss on the last line, such as "step 100  loss 0.00365".
double last_loss(const std::string& text) { return std::stod(text.substr(text.rfind("loss ") + 5)); }

TEST(Examples, BuildAgainstTheInstalledLibraryAndRunOnOneToFourRanks) {
  const Installed installed("examples");
  for (const char* example : {"matrix_product", "distributed_sum", "sharded_linear", "fsdp_checkpoint"}) {
    for (const int ranks : {1, 2, 4}) {
      const auto run = installed.run(example, ranks);  // the examples check their own results
      EXPECT_EQ(run.exit_code, 0) << example << " on " << ranks << " ranks\n" << run.out << run.err;
    }
  }
  EXPECT_THAT(installed.run("matrix_product", 4).out, HasSubstr("A (S(1)), B (S(0)): AB (P(sum))"));
  EXPECT_THAT(installed.run("distributed_sum", 4).out, HasSubstr("sum 500003500006"));
  EXPECT_THAT(installed.run("distributed_sum", 4).out, HasSubstr("rank 3 holds 250000 numbers"));
  EXPECT_THAT(installed.run("sharded_linear", 4).out, HasSubstr("weight (S(0)), 3 of 10 rows on rank 0"));

  const auto one = installed.run("custom_loop", 1), two = installed.run("custom_loop", 2);
  ASSERT_EQ(one.exit_code, 0) << one.out << one.err;
  ASSERT_EQ(two.exit_code, 0) << two.out << two.err;
  EXPECT_NEAR(last_loss(one.out), last_loss(two.out), 0.01 * last_loss(one.out)) << one.out << two.out;

  for (const auto& name : public_headers()) EXPECT_TRUE(installed.has_header("tessera/" + name + ".h")) << name;
  // The other components are in examples_slow_test.cc. Of the components here, one works without libtorch and one
  // includes most of the library.
  const auto outside = installed.build_outside("dtensor;text;train", "outside");
  ASSERT_EQ(outside.exit_code, 0) << outside.out << outside.err;
  EXPECT_EQ(installed.run_outside("outside").out, "sum 30\n");
  EXPECT_FALSE(installed.has_header("tessera/comm/shm/engine.h")) << "no public header includes it";
  const auto unknown = installed.build_outside("dtensor;shm", "unknown");
  EXPECT_NE(unknown.exit_code, 0);
  EXPECT_THAT(unknown.err, HasSubstr("no component 'shm'"));

  for (const char* example :
       {"matrix_product", "distributed_sum", "sharded_linear", "fsdp_checkpoint", "custom_loop"}) {
    const auto run = installed.run(example, 1, "gpu");
    EXPECT_EQ(run.exit_code, 2) << example << ": the device is the argument's";
    EXPECT_THAT(run.err, HasSubstr("device: found 'gpu'")) << example;
  }
}

}  // namespace
}  // namespace tessera::testing
