#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera::testing {
namespace {

// The loss on the last line, "step 100  loss 0.00365".
double last_loss(const std::string& text) { return std::stod(text.substr(text.rfind("loss ") + 5)); }

TEST(CustomLoop, BuildsAgainstTheInstalledLibraryAndTrainsAlikeOnOneAndTwoRanks) {
  TempFolder folder;
  const auto build = std::filesystem::path(program()).parent_path().string();
  const auto prefix = (folder / "prefix").string();
  auto run = run_process({"cmake", "--install", build, "--prefix", prefix});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  run = run_process({"cmake", "-G", "Ninja", "-S", (source_folder() / "examples/custom_loop").string(), "-B",
                     (folder / "example").string(), "-DCMAKE_PREFIX_PATH=" + prefix, "-DCMAKE_BUILD_TYPE=Release",
                     std::string("-DTESSERA_TORCH=") + std::getenv("TESSERA_TORCH")});
  ASSERT_EQ(run.exit_code, 0) << run.out << run.err;
  run = run_process({"cmake", "--build", (folder / "example").string()}, {.timeout_seconds = 300});
  ASSERT_EQ(run.exit_code, 0) << run.out << run.err;
  const auto example = (folder / "example/custom_loop").string();
  const auto one = run_process({example});
  ASSERT_EQ(one.exit_code, 0) << one.out << one.err;
  const auto two = run_process({(std::filesystem::path(prefix) / "bin/tessera").string(), "launch", "--nproc", "2", "--", example});
  ASSERT_EQ(two.exit_code, 0) << two.out << two.err;
  EXPECT_NEAR(last_loss(one.out), last_loss(two.out), 0.01 * last_loss(one.out)) << one.out << two.out;
}

}  // namespace
}  // namespace tessera::testing
