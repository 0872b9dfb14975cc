// `tessera doctor`: its report as JSON and as lines, and its warnings.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <thread>

#include "tests/support/process.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::program;
using testing::run_process;

TEST(Doctor, JsonNamesVersionsMachineBackendsAndKernels) {
  const auto run = run_process({program(), "doctor", "--json"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const auto report = nlohmann::json::parse(run.out);
  EXPECT_THAT(report["versions"]["torch"].get<std::string>(), HasSubstr("2."));
  EXPECT_GT(report["memory"]["total_bytes"].get<int64_t>(), int64_t{1} << 28);
  EXPECT_LE(report["memory"]["available_bytes"].get<int64_t>(), report["memory"]["total_bytes"].get<int64_t>());
  EXPECT_EQ(report["cpu"]["cores_online"].get<unsigned>(), std::thread::hardware_concurrency());
  EXPECT_GE(report["cpu"]["threads"].get<int>(), 1);
  EXPECT_EQ(report["backends"]["gloo"], "yes");
  EXPECT_EQ(report["backends"]["shm"], "yes");
  EXPECT_THAT(report["kernels"]["fp32_matmul"].get<std::string>(), ::testing::AnyOf("onednn", "aten"));
  EXPECT_THAT(report["kernels"]["loops"].get<std::string>(), ::testing::AnyOf("avx512", "avx2", "plain"));
  EXPECT_TRUE(report["files"]["temp_folder_writable"].get<bool>());
}

TEST(Doctor, TextReportHasTheContentOfTheJson) {
  const auto run = run_process({program(), "doctor"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_THAT(run.err, IsEmpty());
  const auto report = nlohmann::json::parse(run_process({program(), "doctor", "--json"}).out);
  for (const char* section : {"versions", "cpu", "memory", "devices", "backends", "kernels", "files"}) {
    EXPECT_THAT(run.out, HasSubstr(std::string(section) + "\n  "));
  }
  EXPECT_THAT(run.out, HasSubstr(report["cpu"]["model"].get<std::string>()));
}

testing::ProcessResult run_with(const std::string& variable, const std::string& value) {
  testing::ProcessOptions options;
  options.environment[variable] = value;
  return run_process({program(), "doctor"}, options);
}

TEST(Doctor, WarnsOfMoreThreadsThanCoresAndOfAnUnusableTemporaryFolder) {
  const auto threads = run_with("OMP_NUM_THREADS", "999");
  EXPECT_EQ(threads.exit_code, 0);
  EXPECT_THAT(threads.out, HasSubstr("warning: 999 threads on"));
  const auto folder = run_with("TMPDIR", "/proc");
  EXPECT_THAT(folder.out, HasSubstr("warning: the temporary folder"));
}

}  // namespace
}  // namespace tessera
