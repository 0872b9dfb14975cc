// The installed library, and projects that are built against the installed library.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera::testing {

// The NAME of every header tessera/NAME.h: "comm", "data" and so on.
inline std::vector<std::string> public_headers() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(source_folder() / "tessera")) {
    if (entry.path().extension() == ".h") names.push_back(entry.path().stem().string());
  }
  return names;
}

class Installed {
 public:
  // Installs the library. If `examples` names a folder of the tree, its examples are built.
  explicit Installed(const std::string& examples) {
    const auto build = std::filesystem::path(program()).parent_path().string();
    require(run_process({"cmake", "--install", build, "--prefix", prefix()}));
    if (examples.empty()) return;
    require(
        run_process({"cmake", "-G", "Ninja", "-S", (source_folder() / examples).string(), "-B",
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

}  // namespace tessera::testing
