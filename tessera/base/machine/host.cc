#include "tessera/base/machine/host.h"

#include <fmt/format.h>
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"

namespace tessera {
namespace {

std::string boot_id() { return first_line(read_file("/proc/sys/kernel/random/boot_id", 4096)); }

// The name of this process's namespace of one kind ("net", "pid", ...), e.g. "net:[4026531840]".
std::string namespace_of(const char* kind) {
  std::error_code failed;
  const auto target = std::filesystem::read_symlink(std::string("/proc/self/ns/") + kind, failed);
  TESSERA_CHECK(!failed, ErrorKind::kIo, "[host] /proc/self/ns/{}: {}", kind, failed.message());
  return target.string();
}

int digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : 0;
}

}  // namespace

std::string host_name() {
  char name[256] = "";
  ::gethostname(name, sizeof name - 1);
  return name;
}

std::string host_identity() {
  std::string identity = host_name();
  try {
    identity += "/" + boot_id();
    identity += "/" + namespace_of("net");
  } catch (const Error&) {  // /proc is not mounted: uses the parts that are known
  }
  std::replace(identity.begin(), identity.end(), '\n', ' ');
  return identity;
}

std::string memory_identity() {
  return fmt::format("{} {} {} {} user {}", boot_id(), namespace_of("pid"), namespace_of("net"), namespace_of("user"),
                     ::geteuid());
}

std::string processor_model() {
  std::string name = "unknown processor", details;
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line) && !line.empty();) {  // an empty line ends each processor
    const size_t colon = line.find(": ");
    if (colon == line.npos) continue;
    const std::string key = line.substr(0, line.find_last_not_of(" \t", colon - 1) + 1);
    const std::string value = line.substr(colon + 2);
    if (key == "model name") name = value;
    for (const auto& [wanted, word] : {std::pair{"cpu family", "family"},  // the first two on x86, the others on Arm
                                       {"model", "model"},
                                       {"CPU implementer", "implementer"},
                                       {"CPU part", "part"}}) {
      if (key == wanted) details += fmt::format("{}{} {}", details.empty() ? "" : ", ", word, value);
    }
  }
  return details.empty() ? name : fmt::format("{} ({})", name, details);
}

// One hexadecimal digit of the returned mask stands for 4 cores. sched_getaffinity() fails if its cpu_set_t is smaller
// than the kernel's set of cores. The needed size is not known, so the function tries larger and larger sets.
std::string core_mask() {
  for (int cores = 1024; cores <= 1 << 20; cores *= 2) {  // the kernel rejects a set that is too small
    const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(CPU_ALLOC(cores), [](cpu_set_t* one) { CPU_FREE(one); });
    const size_t bytes = CPU_ALLOC_SIZE(cores);
    if (!set || ::sched_getaffinity(0, bytes, set.get()) != 0) continue;
    std::string mask(static_cast<size_t>(cores) / 4, '0');
    for (size_t i = 0; i < mask.size(); ++i) {
      int value = 0;
      for (size_t bit = 0; bit < 4; ++bit) value |= CPU_ISSET_S(4 * i + bit, bytes, set.get()) ? 1 << bit : 0;
      mask[i] = "0123456789abcdef"[value];
    }
    mask.resize(mask.find_last_not_of('0') + 1);
    return mask;
  }
  return "1";
}

int count_cores(std::string_view mask) {
  int count = 0;
  for (const char c : mask) count += std::popcount(static_cast<unsigned>(digit(c)));
  return count;
}

std::string union_of_core_masks(std::string_view one, std::string_view other) {
  std::string result(one.size() >= other.size() ? one : other);
  const std::string_view shorter = one.size() >= other.size() ? other : one;
  for (size_t i = 0; i < shorter.size(); ++i) result[i] = "0123456789abcdef"[digit(result[i]) | digit(shorter[i])];
  return result;
}

int usable_cores() { return std::max(1, count_cores(core_mask())); }

void raise_open_files_limit() noexcept {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const rlim_t wanted = std::min<rlim_t>(limit.rlim_max, 65536);
  if (limit.rlim_cur >= wanted) return;
  limit.rlim_cur = wanted;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace tessera
