#include "tessera/base/machine/available_memory.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <string_view>

namespace tessera {
namespace {

namespace fs = std::filesystem;

// Names of the files in which control groups of version 1 or version 2 report limit and usage.
struct GroupFiles {
  const char *limit, *usage;
  const char *file_cache, *mapped, *shared;  // keys of memory.stat
};
constexpr GroupFiles kVersion1 = {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_mapped_file",
                                  "total_shmem"};
constexpr GroupFiles kVersion2 = {"memory.max", "memory.current", "file", "file_mapped", "shmem"};

// A mounted hierarchy of control groups: its group `root` is visible at `point`.
struct GroupMount {
  std::string root;
  fs::path point;
};

struct GroupMounts {
  std::optional<GroupMount> version1{}, version2{};
};

// Parses lines of "key number" or "key: number kB".
std::map<std::string, int64_t> numbers_by_key(const fs::path& path) {
  std::map<std::string, int64_t> numbers;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string key;
    int64_t number = 0;
    if (words >> key >> number) numbers[key] = number;
  }
  return numbers;
}

// Reads the number in a file. Returns nullopt for the text "max" (no limit) and for a missing file.
std::optional<int64_t> number_in(const fs::path& path) {
  int64_t number = 0;
  if (std::ifstream(path) >> number) return number;
  return std::nullopt;
}

// Decodes octal escapes; mountinfo writes a space as \040.
std::string without_octal(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto code = text.substr(i + 1, 3);
    const bool octal =
        text[i] == '\\' && code.size() == 3 && std::ranges::all_of(code, [](char c) { return c >= '0' && c <= '7'; });
    out += octal ? static_cast<char>((code[0] - '0') * 64 + (code[1] - '0') * 8 + code[2] - '0') : text[i];
    if (octal) i += 3;
  }
  return out;
}

// Lines of mountinfo, see proc(5): "36 35 98:0 /root /point options fields... - type source options".
GroupMounts find_group_mounts(const fs::path& root) {
  GroupMounts mounts;
  std::ifstream file(root / "proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string skipped, from, point, type, source, options;
    words >> skipped >> skipped >> skipped >> from >> point;
    while (words >> skipped && skipped != "-") {
    }
    words >> type >> source >> options;
    const GroupMount mount{without_octal(from), root / fs::path(without_octal(point)).relative_path()};
    if (type == "cgroup2") mounts.version2 = mount;
    if (type == "cgroup" && ("," + options + ",").find(",memory,") != std::string::npos) mounts.version1 = mount;
  }
  return mounts;
}

// Applies the memory limits of the control group (cgroup) in `folder` and of its parent control groups, up to the mount
// point. The limit that leaves the fewest bytes decides how much memory a process may still use. Page cache that is not
// shared memory and that no process maps can be reclaimed, so it does not count as used.
void apply_group_limits(const GroupMount& mount, fs::path folder, const GroupFiles& files, AvailableMemory& memory) {
  while (true) {
    const auto limit = number_in(folder / files.limit);
    if (limit && *limit < memory.machine_bytes) {  // version 1 has a limit near 2^63 when there is none
      auto stat = numbers_by_key(folder / "memory.stat");
      const int64_t cache = std::max<int64_t>(0, stat[files.file_cache] - stat[files.mapped] - stat[files.shared]);
      const int64_t used = std::max<int64_t>(0, number_in(folder / files.usage).value_or(0) - cache);
      memory.limit_bytes = std::min(memory.limit_bytes.value_or(*limit), *limit);
      const int64_t left = std::max<int64_t>(0, *limit - used);
      memory.limit_available_bytes = std::min(memory.limit_available_bytes.value_or(left), left);
    }
    if (folder == mount.point || !folder.has_relative_path()) return;
    folder = folder.parent_path();
  }
}

// The folder of the control group `group` in the mounted hierarchy. In a container the group may be outside of the
// mounted part; the result is then the mount point.
fs::path group_folder(const GroupMount& mount, const std::string& group) {
  const std::string base = mount.root == "/" ? "" : mount.root;
  const bool inside = group.starts_with(base) && (group.size() == base.size() || group[base.size()] == '/') &&
                      group.find("/..") == group.npos;
  if (!inside) return mount.point;
  const auto below = fs::path(group.substr(base.size())).relative_path();
  return below.empty() ? mount.point : mount.point / below;
}

}  // namespace

int64_t AvailableMemory::total_bytes() const { return std::min(machine_bytes, limit_bytes.value_or(machine_bytes)); }

int64_t AvailableMemory::available_bytes() const {
  return std::min(machine_available_bytes, limit_available_bytes.value_or(machine_available_bytes));
}

AvailableMemory read_available_memory(const fs::path& root) {
  AvailableMemory memory;
  auto machine = numbers_by_key(root / "proc/meminfo");
  memory.machine_bytes = machine["MemTotal:"] << 10;
  memory.machine_available_bytes = machine["MemAvailable:"] << 10;
  const auto mounts = find_group_mounts(root);
  std::ifstream groups(root / "proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "4:memory:/group"; version 2: "0::/group"
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (second == line.npos) continue;
    const auto controllers = "," + line.substr(first + 1, second - first - 1) + ",", group = line.substr(second + 1);
    if (controllers == ",," && mounts.version2) {
      apply_group_limits(*mounts.version2, group_folder(*mounts.version2, group), kVersion2, memory);
    }
    if (controllers.find(",memory,") != controllers.npos && mounts.version1) {
      apply_group_limits(*mounts.version1, group_folder(*mounts.version1, group), kVersion1, memory);
    }
  }
  return memory;
}

}  // namespace tessera
