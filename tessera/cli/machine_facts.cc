#include "tessera/cli/machine_facts.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string_view>

#include "tessera/base/machine/host.h"
#include "tessera/base/machine/memory_room.h"

namespace tessera::cli {
namespace {

std::string trimmed(std::string text) {
  const auto is_space = [](unsigned char c) { return std::isspace(c) != 0; };
  text.erase(text.begin(), std::ranges::find_if_not(text, is_space));
  text.erase(std::find_if_not(text.rbegin(), text.rend(), is_space).base(), text.end());
  return text;
}

void read_cpu(MachineFacts& facts) {
  constexpr std::array<std::string_view, 14> kDeciding{"avx",         "avx2",        "fma",      "f16c",     "avx512f",
                                                       "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_bf16", "amx_int8",
                                                       "asimd",       "asimddp",     "bf16",     "sve"};
  facts.cpu_model = processor_model();
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    const size_t colon = line.find(':');
    if (line.empty()) break;  // one processor says it for all
    if (colon == line.npos) continue;
    const std::string key = trimmed(line.substr(0, colon));
    if (key != "flags" && key != "Features") continue;
    std::istringstream flags(line.substr(colon + 1));
    for (std::string flag; flags >> flag;) {
      if (std::ranges::find(kDeciding, flag) != kDeciding.end()) facts.cpu_flags.push_back(flag);
    }
  }
}

void read_cores(MachineFacts& facts) {
  facts.cores_online = ::sysconf(_SC_NPROCESSORS_ONLN);
  cpu_set_t allowed;
  facts.cores_allowed =
      ::sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : facts.cores_online;
  double quota = 0, period = 0;
  if (std::ifstream("/sys/fs/cgroup/cpu.max") >> quota >> period && period > 0) facts.cores_quota = quota / period;
}

void read_memory(MachineFacts& facts) {
  const auto room = read_memory_room();
  facts.memory_bytes = room.machine_bytes;
  facts.memory_available_bytes = room.machine_available_bytes;
  facts.memory_limit_bytes = room.limit_bytes;
}

void read_files(MachineFacts& facts) {
  std::error_code error;
  const auto folder = std::filesystem::temp_directory_path(error);
  if (!error) {
    facts.temp_folder = folder.string();
    std::string name = (folder / "tessera-doctor-XXXXXX").string();
    if (const int file = ::mkostemp(name.data(), O_CLOEXEC); file >= 0) {
      facts.temp_folder_writable = ::write(file, "x", 1) == 1;
      ::close(file);
      ::unlink(name.c_str());
    }
    const auto space = std::filesystem::space(folder, error);
    if (!error) facts.temp_free_bytes = static_cast<int64_t>(space.available);
  }
  if (const int memory = ::memfd_create("tessera-doctor", MFD_CLOEXEC); memory >= 0) {
    facts.memfd = ::ftruncate(memory, 4096) == 0;
    ::close(memory);
  }
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0) facts.open_files_limit = static_cast<int64_t>(limit.rlim_cur);
}

}  // namespace

MachineFacts read_machine_facts() {
  MachineFacts facts;
  read_cpu(facts);
  read_cores(facts);
  read_memory(facts);
  read_files(facts);
  return facts;
}

}  // namespace tessera::cli
