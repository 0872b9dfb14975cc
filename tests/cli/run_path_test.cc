// The folders in which the built programs look for their libraries (RPATH and RUNPATH).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/process.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> programs_in(const fs::path& folder) {
  std::vector<std::string> found;
  for (const auto& entry : fs::directory_iterator(folder)) {
    char begin[4] = {};
    std::ifstream file(entry.path(), std::ios::binary);
    if (entry.is_regular_file() && file.read(begin, 4) &&
        std::string(begin, 4) ==
            "\x7f"
            "ELF")
      found.push_back(entry.path().string());
  }
  return found;
}

// The loader resolves an empty or relative entry in the current folder of the user, where another user may have put a
// library.
TEST(RunPath, NoEntryOfABuiltProgramIsEmptyOrRelative) {
  auto command = programs_in(fs::path(program()).parent_path());
  ASSERT_THAT(command, ::testing::Contains(program()));
  command.insert(command.begin(), {"readelf", "-d", "-W"});
  const auto run = run_process(command);
  int told = 0;
  std::string file;
  std::istringstream lines(run.out);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("File: ")) file = line.substr(6);
    if (line.find("(RPATH)") == line.npos && line.find("(RUNPATH)") == line.npos) continue;
    ++told;
    const size_t begin = line.find('[') + 1;
    std::istringstream places(line.substr(begin, line.rfind(']') - begin) + ":");
    for (std::string place; std::getline(places, place, ':');) {
      EXPECT_TRUE(place.starts_with('/') || place.starts_with("$ORIGIN")) << file << ": '" << place << "'";
    }
  }
  EXPECT_GE(told, 1) << run.err;
}

}  // namespace
}  // namespace tessera::testing
