// `tessera doctor`: what this machine, this build and libtorch can do, in well under a second.
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <fmt/format.h>
#include <torch/version.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "tessera/base/version.h"
#include "tessera/cli/flags.h"
#include "tessera/cli/machine_facts.h"
#include "tessera/comm/rendezvous/device_choice.h"
#include "tessera/comm/shm/handshake.h"
#include "tessera/kernels/linear/linear.h"
#include "tessera/kernels/linear/row_product.h"

namespace tessera::cli {
namespace {

using Json = nlohmann::ordered_json;

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

Json report_cpu(const MachineFacts& facts) {
  Json cpu = {{"model", facts.cpu_model},
              {"flags", facts.cpu_flags},
              {"torch_capability", at::get_cpu_capability()},
              {"cores_online", facts.cores_online},
              {"cores_allowed", facts.cores_allowed},
              {"threads", at::get_num_threads()}};
  if (facts.cores_quota) cpu["cores_quota"] = *facts.cores_quota;
  return cpu;
}

Json report_memory(const MachineFacts& facts) {
  Json memory = {{"total_bytes", facts.memory_bytes}, {"available_bytes", facts.memory_available_bytes}};
  if (facts.memory_limit_bytes) memory["limit_bytes"] = *facts.memory_limit_bytes;
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
          {"loops", kernels::row_kernels_name()},
          {"onednn", at::hasMKLDNN()},
          {"mkl", at::hasMKL()}};
}

Json report_files(const MachineFacts& facts) {
  return {{"temp_folder", facts.temp_folder},
          {"temp_folder_writable", facts.temp_folder_writable},
          {"temp_free_bytes", facts.temp_free_bytes},
          {"memfd", facts.memfd},
          {"open_files_limit", facts.open_files_limit}};
}

// What will hurt a run on this machine, one sentence each.
Json report_warnings(const MachineFacts& facts) {
  Json warnings = Json::array();
  if (!facts.temp_folder_writable) {
    warnings.push_back(fmt::format("the temporary folder '{}' cannot be written: set TMPDIR", facts.temp_folder));
  }
  if (!facts.memfd) warnings.push_back("memfd_create is refused: local ranks cannot share memory");
  // MKL bounds what libtorch starts, but not what other OpenMP code in the process does.
  const char* asked = std::getenv("OMP_NUM_THREADS");
  const int threads = std::max(at::get_num_threads(), asked ? std::atoi(asked) : 0);
  if (threads > facts.cores_allowed) {
    warnings.push_back(fmt::format("{} threads on {} cores: set OMP_NUM_THREADS", threads, facts.cores_allowed));
  }
  if (facts.open_files_limit > 0 && facts.open_files_limit < 1024) {
    warnings.push_back(fmt::format("only {} open files are allowed: raise 'ulimit -n'", facts.open_files_limit));
  }
  return warnings;
}

std::string format_value(const std::string& key, const Json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_boolean()) return value.get<bool>() ? "yes" : "no";
  if (value.is_array()) {
    std::string words;
    for (const auto& word : value) words += (words.empty() ? "" : " ") + word.get<std::string>();
    return words.empty() ? "none" : words;
  }
  constexpr std::string_view kBytes = "_bytes";
  if (key.size() > kBytes.size() && key.compare(key.size() - kBytes.size(), kBytes.size(), kBytes) == 0) {
    return fmt::format("{:.1f} GiB", value.get<double>() / (1 << 30));
  }
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

  const MachineFacts facts = read_machine_facts();
  const Json report = {{"versions", report_versions()},  {"cpu", report_cpu(facts)},
                       {"memory", report_memory(facts)}, {"devices", report_devices()},
                       {"backends", report_backends()},  {"kernels", report_kernels()},
                       {"files", report_files(facts)},   {"warnings", report_warnings(facts)}};
  if (json) {
    fmt::print("{}\n", report.dump(-1, ' ', false, Json::error_handler_t::replace));
  } else {
    print_lines(report);
  }
  return 0;
}

}  // namespace tessera::cli
