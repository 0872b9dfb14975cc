// The release packages: a wheel that pip installs and an archive that is unpacked. Both must work without a compiler,
// without the build of this tree, and without files that only a developer's machine has.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "tessera/base/files/file.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;

std::string torch() { return std::getenv("TESSERA_TORCH"); }

// Makes the package of this kind in `out` and returns its path.
std::string package(const fs::path& out, const std::string& kind) {
  const auto run = run_process({"python3", (source_folder() / "scripts/package.py").string(), "--build",
                                fs::path(program()).parent_path().string(), "--torch", torch(), "--out", out.string(),
                                "--only", kind});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  return run.out.substr(0, run.out.find("  "));
}

std::string python() { return std::getenv("TESSERA_PYTHON"); }

// All libraries that the program loads must be under `prefix`, except the C and C++ run time.
void expect_own_libraries(const fs::path& installed, const fs::path& prefix) {
  const auto run = run_process({"ldd", installed.string()});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  std::istringstream lines(run.out);
  int of_ours = 0;
  for (std::string line; std::getline(lines, line);) {
    EXPECT_EQ(line.find("not found"), line.npos) << line;
    const size_t arrow = line.find("=> ");
    if (arrow == line.npos) continue;
    const auto path = line.substr(arrow + 3, line.rfind(" (") - arrow - 3);
    const auto name = line.substr(1, line.find(' ') - 1);
    if (path.starts_with(prefix.string())) {
      ++of_ours;
    } else {
      EXPECT_THAT(name, MatchesRegex("lib(c|m|dl|rt|pthread|gcc_s|stdc\\+\\+)\\.so\\.[0-9]+"));
    }
  }
  EXPECT_GT(of_ours, 5);
}

// The installed file must not contain the source folder of the machine that built it.
void expect_no_source_paths(const fs::path& installed) {
  EXPECT_EQ(read_file(installed, size_t{1} << 30).find(testing::source_folder().string()), std::string::npos)
      << installed;
}

// If a licence text only names a file of Debian's common licences, the package must also contain the text of that file.
void expect_whole_licences(const fs::path& prefix) {
  int licences = 0, named = 0;
  for (const auto& entry : fs::directory_iterator(prefix / "share/doc/tessera/licences")) {
    const std::string text = read_file(entry.path());
    EXPECT_GT(text.size(), 200u) << entry.path();
    ++licences;
    const std::string place = "/usr/share/common-licenses/";
    for (size_t at = 0; (at = text.find(place, at)) != text.npos;) {
      at += place.size();
      const bool several = text[at] == '{';  // {GPL-2,LGPL-2.1}
      std::istringstream names(
          text.substr(at + several, text.find_first_of(several ? "}" : "'`\", ;:)\n", at) - at - several));
      for (std::string name; std::getline(names, name, ',');) {
        if (name.ends_with('.')) name.pop_back();
        ++named;
        ASSERT_TRUE(fs::exists(place + name)) << entry.path() << " names " << name;
        EXPECT_NE(text.find(read_file(place + name)), text.npos) << entry.path() << " names " << name;
      }
    }
  }
  EXPECT_GT(licences, 5);
  EXPECT_GT(named, 0);
}

ProcessResult installed_run(const std::string& tessera, const std::vector<std::string>& arguments, const fs::path& home,
                            const std::string& path) {
  std::vector<std::string> command = {"env", "-i", "HOME=" + home.string(), "PATH=" + path, "LANG=C.UTF-8", tessera};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return run_process(command, {.timeout_seconds = 600});
}

// Runs a few steps of the demo with the package's own recipe. The recipe has paths of data relative to the current
// folder, so the test gives other paths.
void expect_demo(const std::string& tessera, const fs::path& prefix, const TempFolder& temp, const std::string& path) {
  const auto doctor = installed_run(tessera, {"doctor"}, temp.path(), path);
  ASSERT_EQ(doctor.exit_code, 0) << doctor.err;
  EXPECT_THAT(doctor.out, HasSubstr("2."));
  const auto help = installed_run(tessera, {"--help"}, temp.path(), path);
  EXPECT_EQ(help.exit_code, 0);
  const auto assets = fs::path(asset("smollm2")).parent_path();
  const auto run = installed_run(
      tessera,
      {"train", (prefix / "share/tessera/recipes/demo.yaml").string(), "--nproc", "2",
       "model.path=" + (assets / "smollm2").string(), "data.train=" + (assets / "text/dialogues.jsonl").string(),
       "data.validation=" + (assets / "text/dialogues-held-out.jsonl").string(), "train.steps=2",
       "schedule.warmup_steps=1", "checkpoint.dir=" + (temp / "run").string()},
      temp.path(), path);
  ASSERT_EQ(run.exit_code, 0) << run.err;
  EXPECT_TRUE(fs::exists(temp / "run/model/model.safetensors"));
  const auto report = installed_run(tessera, {"report", (temp / "run").string(), "-o", (temp / "report.html").string()},
                                    temp.path(), path);
  EXPECT_EQ(report.exit_code, 0) << report.err;
}

// A virtual environment with links to the packages of the oracle's environment. pip counts them as installed, so it
// downloads nothing.
TEST(Package, TheWheelInstalledWithPipTrainsTheDemoWithoutACompiler) {
  const TempFolder temp;
  const auto wheel = package(temp / "out", "wheel");
  EXPECT_THAT(fs::path(wheel).filename().string(),
              MatchesRegex("tessera-[0-9.]+-py3-none-manylinux_2_[0-9]+_(x86_64|aarch64)\\.whl"));
  ASSERT_EQ(run_process({python(), "-m", "venv", (temp / "venv").string()}).exit_code, 0);
  const auto theirs = fs::path(torch()).parent_path();
  const auto ours = temp / "venv/lib" / theirs.parent_path().filename() / "site-packages";
  ASSERT_TRUE(fs::is_directory(ours)) << ours;
  for (const auto& entry : fs::directory_iterator(theirs)) {
    if (!fs::exists(ours / entry.path().filename())) fs::create_symlink(entry.path(), ours / entry.path().filename());
  }
  const auto pip = (temp / "venv/bin/pip").string();
  const auto install = run_process({pip, "install", "--no-index", "--disable-pip-version-check", wheel});
  ASSERT_EQ(install.exit_code, 0) << install.err;
  EXPECT_THAT(install.out, AllOf(HasSubstr("already satisfied: torch=="), HasSubstr("Successfully installed tessera")));
  const auto tessera = (temp / "venv/bin/tessera").string();
  expect_own_libraries(tessera, temp / "venv");
  expect_no_source_paths(tessera);
  const auto bin = (temp / "venv/bin").string();
  expect_demo("tessera", temp / "venv", temp, bin);
  EXPECT_EQ(run_process({pip, "check"}).out.find("tessera"), std::string::npos);
  ASSERT_EQ(run_process({pip, "uninstall", "-y", "tessera"}).exit_code, 0);
  EXPECT_FALSE(fs::exists(tessera));
  EXPECT_FALSE(fs::exists(temp / "venv/share/tessera/recipes/demo.yaml"));
}

TEST(Package, TheRecordOfTheWheelMatchesItsFiles) {
  const TempFolder temp;
  const auto wheel = package(temp / "out", "wheel");
  const auto run = run_python("tests/cli/oracle/check_wheel.py", {wheel});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_THAT(run.out, HasSubstr("ok"));
}

TEST(Package, TheArchiveRunsFromAnyFolder) {
  const TempFolder temp;
  const auto archive = package(temp / "out", "archive");
  ASSERT_EQ(run_process({"tar", "-xzf", archive, "-C", temp.path().string()}).exit_code, 0);
  fs::path prefix;
  for (const auto& entry : fs::directory_iterator(temp.path())) {
    if (entry.path().filename().string().starts_with("tessera-")) prefix = entry.path();
  }
  fs::rename(prefix, temp / "moved here");
  prefix = temp / "moved here";
  expect_own_libraries(prefix / "bin/tessera", prefix);
  expect_demo((prefix / "bin/tessera").string(), prefix, temp, "/nonexistent");
  EXPECT_TRUE(fs::exists(prefix / "share/doc/tessera/licences/libtorch"));
  expect_whole_licences(prefix);
}

}  // namespace
}  // namespace tessera::testing
