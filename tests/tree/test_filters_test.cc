// Tests of cmake/TestFilters.cmake: a filter that matches no test stops the configuration.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

ProcessResult check_filter(const std::string& filter) {
  const TempFolder folder;
  std::ofstream(folder / "some_test.cc") << "TEST(Suite, Name) {}\nTEST_P(Family,\n       Without) {}\n";
  std::ofstream(folder / "check.cmake") << "include(\"" << (source_folder() / "cmake/TestFilters.cmake").string()
                                        << "\")\ncheck_test_filter(\"" << filter << "\" \""
                                        << (folder / "some_test.cc").string() << "\")\n";
  return run_process({"cmake", "-P", (folder / "check.cmake").string()});
}

TEST(TestFilters, MatchTests) {
  for (const char* filter : {"*", "Suite.*", "Suite.Name", "All/Family.Without*", "S*:F*-Suite.Name"}) {
    const auto run = check_filter(filter);
    EXPECT_EQ(run.exit_code, 0) << filter << run.err;
  }
}

TEST(TestFilters, AnErrorNamesThePatternWithoutATest) {
  for (const char* pattern : {"Suite.Other", "Gone*", "All/Family.With"}) {
    const auto run = check_filter(std::string("Suite.*:") + pattern);
    EXPECT_NE(run.exit_code, 0) << pattern;
    EXPECT_THAT(run.err, HasSubstr(std::string("'") + pattern + "' matches no test"));
  }
}

}  // namespace
}  // namespace tessera::testing
