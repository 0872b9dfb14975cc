// The examples, built as a user builds them: against the installed library, then run on several ranks.
#include <gmock/gmock.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

// The loss on the last line, "step 100  loss 0.00365".
double last_loss(const std::string& text) { return std::stod(text.substr(text.rfind("loss ") + 5)); }

class Installed {
 public:
  // Installs once and builds all examples.
  Installed() {
    const auto build = std::filesystem::path(program()).parent_path().string();
    require(run_process({"cmake", "--install", build, "--prefix", prefix()}));
    require(
        run_process({"cmake", "-G", "Ninja", "-S", (source_folder() / "examples").string(), "-B",
                     (folder_ / "examples").string(), "-DCMAKE_PREFIX_PATH=" + prefix(), "-DCMAKE_BUILD_TYPE=Release",
                     std::string("-DTESSERA_TORCH=") + std::getenv("TESSERA_TORCH")}));
    require(run_process({"cmake", "--build", (folder_ / "examples").string()}, {.timeout_seconds = 600}));
  }
  // Configures and builds tests/examples/outside with these components.
  ProcessResult build_outside(const std::string& components, const std::string& name) const {
    const auto build = (folder_ / name).string();
    auto run = run_process({"cmake", "-G", "Ninja", "-S", (source_folder() / "tests/examples/outside").string(), "-B",
                            build, "-DCMAKE_PREFIX_PATH=" + prefix(), "-DCOMPONENTS=" + components,
                            std::string("-DTESSERA_TORCH=") + std::getenv("TESSERA_TORCH")});
    return run.exit_code != 0 ? run : run_process({"cmake", "--build", build}, {.timeout_seconds = 600});
  }
  ProcessResult run_outside(const std::string& name) const {
    return run_process({(folder_ / name / "outside").string()});
  }
  bool has_header(const std::string& path) const {
    return std::filesystem::exists(std::filesystem::path(prefix()) / "include" / path);
  }

  ProcessResult run(const std::string& example, int ranks, const std::string& device = "auto") const {
    const auto path = (folder_ / "examples" / example / example).string();
    if (ranks == 1) return run_process({path, device});
    return run_process({prefix() + "/bin/tessera", "launch", "--nproc", std::to_string(ranks), "--", path, device});
  }

 private:
  static void require(const ProcessResult& run) {
    if (run.exit_code != 0) throw std::runtime_error(run.out + run.err);
  }
  std::string prefix() const { return (folder_ / "prefix").string(); }
  TempFolder folder_;
};

TEST(Examples, BuildAgainstTheInstalledLibraryAndRunOnOneToFourRanks) {
  const Installed installed;
  for (const char* example : {"matrix_product", "distributed_sum", "sharded_linear", "fsdp_checkpoint"}) {
    for (const int ranks : {1, 2, 4}) {
      const auto run = installed.run(example, ranks);  // they check their own results
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

  std::string components;
  for (const auto& entry : std::filesystem::directory_iterator(source_folder() / "tessera")) {
    if (entry.path().extension() != ".h") continue;
    components += (components.empty() ? "" : ";") + entry.path().stem().string();
    EXPECT_TRUE(installed.has_header("tessera/" + entry.path().filename().string())) << entry.path();
  }
  const auto outside = installed.build_outside(components, "outside");
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
