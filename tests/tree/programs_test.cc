// Tests of the libraries that our programs are linked with.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/support/process.h"
#include "tests/tree/source_tree.h"

namespace tessera::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// libtorch exports such functions, too, from another libstdc++ than the program's (cmake/TesseraDependencies.cmake).
TEST(Programs, ImportNoUnversionedStdFunctions) {
  for (const auto& path : {program(), pretend_program()}) {
    const auto run = run_process({"nm", "--dynamic", "--undefined-only", "--demangle", path});
    ASSERT_EQ(run.exit_code, 0) << run.err;
    EXPECT_THAT(unversioned_std(run.out), IsEmpty()) << path;
  }
  EXPECT_THAT(unversioned_std("                 U std::filesystem::remove_all(std::filesystem::path const&)\n"
                              "                 U std::terminate()@GLIBCXX_3.4\n"
                              "                 U c10::Error::what() const\n"),
              ElementsAre("std::filesystem::remove_all(std::filesystem::path const&)"));
}

TEST(Programs, LoadLibstdcxxBeforeLibtorch) {
  const auto run = run_process({"objdump", "--private-headers", program()});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const auto standard = run.out.find("libstdc++.so"), torch = run.out.find("libtorch");
  ASSERT_NE(standard, run.out.npos);
  EXPECT_LT(standard, torch);
}

}  // namespace
}  // namespace tessera::testing
