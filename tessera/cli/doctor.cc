// `tessera doctor`: reports what this machine, this build and libtorch support, in well under a second.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <fcntl.h>
#include <fmt/ranges.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <torch/version.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string_view>
#include <vector>

#include "tessera/base/machine/available_memory.h"
#include "tessera/base/machine/host.h"
#include "tessera/base/text/json_numbers.h"
#include "tessera/base/version.h"
#include "tessera/cli/flags.h"
#include "tessera/comm/rendezvous/device_choice.h"
#include "tessera/comm/shm/handshake.h"
#include "tessera/kernels/linear/batch_invariant_linear.h"
#include "tessera/kernels/linear/linear.h"

namespace tessera::cli {
namespace {

Json report_versions() {
  return {
    {"tessera", version()}, {"torch", TORCH_VERSION},
#if defined(__clang__)
        {"compiler", "clang " __clang_version__},
#else
        {"compiler", "gcc " __VERSION__},
#endif
    {
      "fmt", fmt::format("{}.{}.{}", FMT_VERSION / 10000, FMT_VERSION / 100 % 100, FMT_VERSION % 100)
    }
  };
}

// The instruction sets on which the choice of kernels depends, as far as the first processor has them.
Json deciding_cpu_flags() {
  constexpr std::array<std::string_view, 14> kDeciding{"avx",         "avx2",        "fma",      "f16c",     "avx512f",
                                                       "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_bf16", "amx_int8",
                                                       "asimd",       "asimddp",     "bf16",     "sve"};
  Json found = Json::array();
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line) && !line.empty();) {  // an empty line ends each processor
    if (!line.starts_with("flags") && !line.starts_with("Features")) continue;
    std::istringstream flags(line.substr(line.find(':') + 1));
    for (std::string flag; flags >> flag;) {
      if (std::ranges::find(kDeciding, flag) != kDeciding.end()) found.push_back(flag);
    }
  }
  return found;
}

Json report_cpu() {
  Json cpu = {{"model", processor_model()},
              {"flags", deciding_cpu_flags()},
              {"torch_capability", at::get_cpu_capability()},
              {"cores_online", ::sysconf(_SC_NPROCESSORS_ONLN)},
              {"cores_allowed", usable_cores()},
              {"threads", at::get_num_threads()}};
  double quota = 0, period = 0;
  if (std::ifstream("/sys/fs/cgroup/cpu.max") >> quota >> period && period > 0) cpu["cores_quota"] = quota / period;
  return cpu;
}

// `limit_bytes` is the limit of the process's control groups (containers), which may be lower than the memory of the
// machine.
Json report_memory() {
  const auto room = read_available_memory();
  Json memory = {{"total_bytes", room.machine_bytes}, {"available_bytes", room.machine_available_bytes}};
  if (room.limit_bytes) memory["limit_bytes"] = *room.limit_bytes;
  return memory;
}

Json report_devices() {
  const bool cuda_built = at::hasCUDA();
  return {{"cpu", true},
          {"cuda_in_this_libtorch", at::CUDAHooksRegistry()->Has("CUDAHooks")},
          {"cuda_devices", cuda_built ? static_cast<int64_t>(at::detail::getCUDAHooks().deviceCount()) : 0},
          {"auto", comm::describe_device({}, 1)}};
}

Json report_backends() {
#if defined(USE_C10D_NCCL)
  const char* nccl = "yes";
#else
  const char* nccl = "no, not in this build";
#endif
  const std::string reason = comm::shm::why_unavailable();
  return {{"gloo", "yes"}, {"nccl", nccl}, {"shm", reason.empty() ? "yes" : "no, " + reason}};
}

Json report_kernels() {
  return {{"fp32_matmul", kernels::linear_kernel_name()},
          {"bf16_matmul", kernels::linear_kernel_name(at::kBFloat16)},
          {"fp16_matmul", kernels::linear_kernel_name(at::kHalf)},
          {"loops", kernels::vector_level_name()},
          {"onednn", at::hasMKLDNN()},
          {"mkl", at::hasMKL()}};
}

Json report_files() {
  Json files = {{"temp_folder", ""},
                {"temp_folder_writable", false},
                {"temp_free_bytes", 0},
                {"memfd", false},
                {"open_files_limit", 0}};
  std::error_code error;
  const auto folder = std::filesystem::temp_directory_path(error);
  if (!error) {
    files["temp_folder"] = folder.string();
    std::string name = (folder / "tessera-doctor-XXXXXX").string();
    if (const int file = ::mkostemp(name.data(), O_CLOEXEC); file >= 0) {
      files["temp_folder_writable"] = ::write(file, "x", 1) == 1;
      ::close(file);
      ::unlink(name.c_str());
    }
    const auto space = std::filesystem::space(folder, error);
    if (!error) files["temp_free_bytes"] = static_cast<int64_t>(space.available);
  }
  if (const int memory = ::memfd_create("tessera-doctor", MFD_CLOEXEC); memory >= 0) {
    files["memfd"] = ::ftruncate(memory, 4096) == 0;
    ::close(memory);
  }
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0) files["open_files_limit"] = static_cast<int64_t>(limit.rlim_cur);
  return files;
}

// One sentence for each condition that will slow down or break a run on this machine.
Json report_warnings(const Json& cpu, const Json& files) {
  Json warnings = Json::array();
  if (!files["temp_folder_writable"].get<bool>()) {
    warnings.push_back(fmt::format("the temporary folder '{}' cannot be written: set TMPDIR",
                                   files["temp_folder"].get<std::string>()));
  }
  if (!files["memfd"].get<bool>()) warnings.push_back("memfd_create is refused: local ranks cannot share memory");
  // MKL limits the threads of libtorch to the number of cores, but other OpenMP code in the process starts as many
  // threads as OMP_NUM_THREADS says.
  const char* asked = std::getenv("OMP_NUM_THREADS");
  const int threads = std::max(at::get_num_threads(), asked ? std::atoi(asked) : 0);
  if (const auto cores = cpu["cores_allowed"].get<int64_t>(); threads > cores) {
    warnings.push_back(fmt::format("{} threads on {} cores: set OMP_NUM_THREADS", threads, cores));
  }
  if (const auto limit = files["open_files_limit"].get<int64_t>(); limit > 0 && limit < 1024) {
    warnings.push_back(fmt::format("only {} open files are allowed: raise 'ulimit -n'", limit));
  }
  return warnings;
}

// Returns the text of a value of the report: a string as it is; "yes" or "no" for a boolean; the words of an array
// joined by spaces, or "none"; a size such as "1.5 GiB" for a number whose key ends in "_bytes"; the JSON for any other
// value.
std::string format_value(const std::string& key, const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_boolean()) return value.get<bool>() ? "yes" : "no";
  if (value.is_array()) {
    return value.empty() ? "none" : fmt::format("{}", fmt::join(value.get<std::vector<std::string>>(), " "));
  }
  if (key.ends_with("_bytes")) return fmt::format("{:.1f} GiB", value.get<double>() / (1 << 30));
  return value.dump();
}

std::string label_of(std::string key) {
  if (const size_t bytes = key.find("_bytes"); bytes != key.npos) key.erase(bytes);
  std::replace(key.begin(), key.end(), '_', ' ');
  return key;
}

void print_lines(const Json& report) {
  for (const auto& [section, entries] : report.items()) {
    if (entries.is_array()) continue;
    std::printf("%s\n", section.c_str());
    for (const auto& [key, value] : entries.items()) {
      fmt::print("  {:<24} {}\n", label_of(key), format_value(key, value));
    }
  }
  for (const auto& warning : report["warnings"]) fmt::print("warning: {}\n", warning.get<std::string>());
  if (report["warnings"].empty()) fmt::print("No problems found.\n");
}

}  // namespace

int run_doctor(VerbArguments args) {
  auto app = make_app("doctor");
  bool json = false;
  app->add_flag("--json", json, "One JSON object on stdout instead of lines");
  app->footer("The exit code is 0 also when there are warnings; --json holds them in \"warnings\".");
  if (const auto code = parse_flags(*app, args)) return *code;

  const Json cpu = report_cpu(), files = report_files();
  const Json report = {{"versions", report_versions()},
                       {"cpu", cpu},
                       {"memory", report_memory()},
                       {"devices", report_devices()},
                       {"backends", report_backends()},
                       {"kernels", report_kernels()},
                       {"files", files},
                       {"warnings", report_warnings(cpu, files)}};
  if (json) {
    fmt::print("{}\n", dump_json(report));
  } else {
    print_lines(report);
  }
  return 0;
}

}  // namespace tessera::cli
