// scripts/setup.sh where there is no network.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "tessera/base/file.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

TEST(Setup, WhatCannotBeFetchedIsTriedOnceAndEndsNoBuild) {
  const TempFolder folder;
  fs::create_directories(folder / "scripts");
  fs::create_directories(folder / "bin");
  std::ofstream(folder / "scripts/arrow.lock") << "pyarrow==1\n";
  std::ofstream(folder / "bin/python3") << "#!/bin/sh\necho \"$@\" >> calls\nexit 1\n";
  fs::permissions(folder / "bin/python3", fs::perms::owner_all);
  const std::string build = "cd '" + folder.path().string() + "' && PATH=$PWD/bin:$PATH && set -eu && . '" +
                            (source_folder() / "scripts/setup.sh").string() + "' && setup_arrow && echo goes on";
  const auto tried = [&] {
    const std::string calls = read_file(folder / "calls");
    int count = 0;
    for (size_t at = 0; (at = calls.find("-m venv", at)) != calls.npos; ++at) ++count;
    return count;
  };
  for (int time = 0; time < 2; ++time) {
    const auto run = run_process({"bash", "-c", build});
    EXPECT_EQ(run.exit_code, 0) << run.err;
    EXPECT_THAT(run.out, HasSubstr("goes on"));
    EXPECT_EQ(run.err.find("data in Parquet will not be read") != run.err.npos, time == 0) << run.err;
    EXPECT_EQ(tried(), 1);
  }
  std::ofstream(folder / "scripts/arrow.lock") << "pyarrow==2\n";
  EXPECT_EQ(run_process({"bash", "-c", build}).exit_code, 0);
  EXPECT_EQ(tried(), 2) << "another lock file";
}

}  // namespace
}  // namespace tessera::testing
