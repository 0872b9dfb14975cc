#include "tessera/data/rows/cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/files/scratch_folder.h"
#include "tessera/base/files/staged.h"
#include "tessera/base/files/unique_fd.h"
#include "tessera/base/files/user_cache.h"
#include "tessera/base/log.h"
#include "tessera/base/machine/host.h"
#include "tessera/base/text/json.h"
#include "tessera/base/text/random_hex.h"
#include "tessera/data/rows/cache_lock.h"

namespace tessera::data {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void raise_changed(const fs::path& file) {
  raise(ErrorKind::kConfig, "[data.cache] {}: changed while it was read. Start again when no program writes to it.",
        file.string());
}

std::string hash_content(const fs::path& path) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  TESSERA_CHECK(file.open(), ErrorKind::kIo, "[data.cache] {}: cannot be opened for reading: {}", path.string(),
                std::strerror(errno));
  const std::unique_ptr<XXH3_state_t, decltype(&XXH3_freeState)> state(XXH3_createState(), &XXH3_freeState);
  XXH3_128bits_reset(state.get());
  std::vector<char> buffer(size_t{1} << 20);
  for (;;) {
    const ssize_t count = ::read(file.get(), buffer.data(), buffer.size());
    if (count < 0 && errno == EINTR) continue;
    TESSERA_CHECK(count >= 0, ErrorKind::kIo, "[data.cache] {}: cannot be read: {}", path.string(),
                  std::strerror(errno));
    if (count == 0) break;
    XXH3_128bits_update(state.get(), buffer.data(), static_cast<size_t>(count));
  }
  const auto hash = XXH3_128bits_digest(state.get());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

// Holds the lock of one key while it lives. Waits while another process holds the lock. Without locks in this file
// system it continues without the lock, with a warning.
class KeyLock {
 public:
  // Locks the file `path`, and waits while another process holds its lock. Error kInternal when `*stop` becomes true
  // during the wait; kIo when the file cannot be opened. `entry_name` is the name of the cache entry in messages.
  KeyLock(const fs::path& path, const std::string& entry_name, const std::atomic<bool>* stop)
      : file_(open_to_lock(path, O_CREAT)) {
    constexpr std::chrono::milliseconds kRetryInterval{200};
    TESSERA_CHECK(file_.open(), ErrorKind::kIo, "[data.cache] {}: cannot be opened: {}", path.string(),
                  std::strerror(errno));
    bool logged = false;
    while ((state_ = try_lock(file_)) == LockState::kBusy) {
      if (!logged) {
        log_info("[data.cache] another process tokenizes the same data; waiting until {} is ready", entry_name);
      }
      logged = true;
      TESSERA_CHECK(!stop || !*stop, ErrorKind::kInternal,
                    "[data.cache] {}: asked to stop while another process makes it.", entry_name);
      std::this_thread::sleep_for(kRetryInterval);
    }
    if (state_ == LockState::kNoLocks) {
      log_warning(
          "[data.cache] {}: this file system has no locks, so several processes may tokenize the same data at the same "
          "time.",
          path.parent_path().string());
    }
  }

  bool held() const { return state_ == LockState::kHeld; }

 private:
  UniqueFd file_;  // closing the file releases the lock
  LockState state_;
};

// The present entries of a folder; empty if it cannot be read.
std::vector<fs::path> entries_of(const fs::path& folder) {
  std::vector<fs::path> found;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    found.push_back(entry->path());
  }
  return found;
}

// The host that makes or made an entry; "" if unknown.
std::string maker_of(const fs::path& entry) {
  try {
    return read_file(entry / kMakerName, 256);
  } catch (const Error&) {  // the process was killed before it wrote the file
    return "";
  }
}

// The time since the last change of the folder or of a file in it.
fs::file_time_type::duration untouched_for(const fs::path& folder) {
  std::error_code error;
  auto touched = fs::last_write_time(folder, error);
  if (error) return {};
  for (const auto& file : entries_of(folder)) touched = std::max(touched, fs::last_write_time(file, error));
  return fs::file_time_type::clock::now() - touched;
}

// Whether a staged entry will never be finished. `locked`: this process holds the lock of the entry's key, so no
// process of this host writes the entry. A process of another host may write it if that host does not see the lock, so
// for an entry of another host only the age of its files decides.
bool is_abandoned(const fs::path& staged, bool locked) {
  constexpr auto kAbandonedAfter = std::chrono::hours(24);
  return (locked && maker_of(staged) == host_name()) || untouched_for(staged) > kAbandonedAfter;
}

// Removes the staged entries of `key` in `folder` that killed processes left. The caller holds the lock of `key`.
void remove_staged(const fs::path& folder, const std::string& key) {
  for (const auto& path : entries_of(folder)) {
    const auto name = path.filename().string();
    if (!name.starts_with("." + key + ".") || !name.ends_with(".tmp") || !is_abandoned(path, true)) continue;
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
}

// A key is 32 hexadecimal digits.
bool is_key(const std::string& name) {
  return name.size() == 32 && name.find_first_not_of("0123456789abcdef") == name.npos;
}

// The key in ".KEY.RANDOM.tmp", an entry that is being written, and in ".KEY.RANDOM.old", an entry that was replaced or
// is being removed; "" for any other name.
std::string key_of_leftover(const std::string& name) {
  const bool ours = name.size() > 34 && name[0] == '.' && name[33] == '.' && is_key(name.substr(1, 32)) &&
                    (name.ends_with(".tmp") || name.ends_with(".old"));
  return ours ? name.substr(1, 32) : "";
}

struct CacheEntry {
  fs::path folder;
  std::string maker;
  uint64_t bytes = 0;
  std::chrono::system_clock::time_point used{};
};

// A complete entry of any version; nullopt for any other folder. Only such folders are ever removed by age or size.
std::optional<CacheEntry> read_cache_entry(const fs::path& folder) {
  const auto name = folder.filename().string();
  if (!is_key(name) || !fs::is_directory(fs::symlink_status(folder))) return std::nullopt;
  const auto set = folder / "set.json";
  try {
    const auto where = "[data.cache] " + set.string();
    const Json json = parse_json_object(read_file(set, size_t{16} << 20), where);
    const JsonReader reader(json, where);
    if (reader.string("key") != name || !json.contains("fingerprint")) return std::nullopt;
  } catch (const Error&) {
    return std::nullopt;
  }
  CacheEntry entry{.folder = folder, .maker = maker_of(folder)};
  struct stat info {};
  for (const auto& file : {set, folder / kMakerName}) {
    if (::stat(file.c_str(), &info) != 0) continue;
    entry.used = std::max(entry.used, std::chrono::system_clock::from_time_t(info.st_mtime));
  }
  std::error_code error;
  for (const auto& file : entries_of(folder)) {
    const auto size = fs::file_size(file, error);
    if (!error) entry.bytes += size;
  }
  return entry;
}

// Whether no process has an entry open. Readers hold a shared lock on set.json, so an exclusive lock proves that no
// reader exists; `set` receives this lock and holds it until it is closed. True also when set.json does not exist;
// false when it cannot be opened or locked for another reason.
bool is_unused(const fs::path& folder, UniqueFd& set) {
  set = open_to_lock(folder / "set.json", O_NOFOLLOW);
  return set.open() ? try_lock(set) == LockState::kHeld : errno == ENOENT;
}

// Renames an entry to ".KEY.RANDOM.old", then deletes it if `removes` is set. The rename is atomic and comes before the
// deletion, so a partly deleted entry never has the name of the entry.
std::error_code move_aside(const fs::path& folder, bool removes) {
  const auto aside = folder.parent_path() / fmt::format(".{}.{}.old", folder.filename().string(), random_hex(8));
  std::error_code error, ignored;
  fs::rename(folder, aside, error);
  if (!error && removes) fs::remove_all(aside, ignored);
  return error;
}

bool remove_unused(const fs::path& folder) {
  UniqueFd set;
  return is_unused(folder, set) && !move_aside(folder, /*removes=*/true);
}

// Renames an old entry, so that a new entry can get its name. Processes that have the old entry open keep using its
// files. The old entry is deleted at once only if no process of any host has it open; otherwise prune() deletes it
// later.
void replace_entry(const fs::path& folder) {
  UniqueFd set;
  const auto error = move_aside(folder, is_unused(folder, set) && locks_reach_all_hosts(folder));
  TESSERA_CHECK(!error, ErrorKind::kIo,
                "[data.cache] {}: cannot be replaced: {}. Remove it, or set data.cache to another folder.",
                folder.string(), error.message());
}

void make_folders(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  TESSERA_CHECK(!error, ErrorKind::kIo,
                "[data.cache] {}: cannot be made: {}. Set data.cache to another folder, or to off.", folder.string(),
                error.message());
}

}  // namespace

FileStamp read_file_stamp(const fs::path& path) {
  struct stat info {};
  TESSERA_CHECK(::stat(path.c_str(), &info) == 0, ErrorKind::kIo, "[data.cache] {}: {}", path.string(),
                std::strerror(errno));
  const auto ns = [](const timespec& time) { return time.tv_sec * int64_t{1'000'000'000} + time.tv_nsec; };
  return {static_cast<uint64_t>(info.st_dev), static_cast<uint64_t>(info.st_ino), info.st_size, ns(info.st_mtim),
          ns(info.st_ctim)};
}

UnchangedFiles::UnchangedFiles(std::vector<fs::path> files) : files_(std::move(files)) {
  for (const auto& file : files_) stamps_.push_back(read_file_stamp(file));
}

void UnchangedFiles::check() const {
  for (size_t i = 0; i < files_.size(); ++i) {
    if (read_file_stamp(files_[i]) != stamps_[i]) raise_changed(files_[i]);
  }
}

// Compares only the size and the modification time of each file with those that were recorded: a file with another
// owner, mode or link count does not count as changed. A file that cannot be read counts as changed.
std::optional<fs::path> UnchangedFiles::changed() const {
  for (size_t i = 0; i < files_.size(); ++i) {
    try {
      const auto now = read_file_stamp(files_[i]);
      if (now.size != stamps_[i].size || now.modified_ns != stamps_[i].modified_ns) return files_[i];
    } catch (const Error&) {
      return files_[i];
    }
  }
  return std::nullopt;
}

fs::path DataCache::folder_of(const std::string& setting) {
  if (setting == "off") return {};
  if (setting != "auto") return setting;
  auto folder = user_cache();
  if (!folder.empty()) folder /= "data";
  std::error_code error;
  if (!folder.empty()) fs::create_directories(folder, error);
  if (!folder.empty() && !error && ::access(folder.c_str(), W_OK) == 0) return folder;
  log_warning(
      "[data.cache] {}: cannot be written, so each start tokenizes the data again. Set data.cache to a folder that can "
      "be written.",
      folder.empty() ? "~/.cache" : folder.string());
  return {};
}

// To read and hash all data files at each start would be slow. So the hash of a data file is stored in
// files/HASH_OF_PATH.json, together with the data file's path, device, inode, size and times. A stored hash is used
// only if all of these are unchanged.
std::string DataCache::content_hash(const fs::path& file) const {
  const auto before = read_file_stamp(file);
  std::error_code unknown;
  const auto place = fs::canonical(file, unknown).string();
  TESSERA_CHECK(!unknown, ErrorKind::kIo, "[data.cache] {}: {}", file.string(), unknown.message());
  const auto name = fmt::format("{:016x}.json", XXH3_64bits(place.data(), place.size()));
  const Json wanted = {{"version", 1},
                       {"path", place},
                       {"device", before.device},
                       {"inode", before.inode},
                       {"size", before.size},
                       {"modified_ns", before.modified_ns},
                       {"changed_ns", before.changed_ns}};
  const fs::path known = folder_.empty() ? fs::path() : folder_ / "files" / name;
  std::error_code missing;
  if (!known.empty() && fs::exists(known, missing)) {
    try {
      Json found = parse_json_object(read_file(known, size_t{1} << 20), "[data.cache] " + known.string());
      const auto hash = JsonReader(found, "[data.cache] " + known.string()).string("hash");
      found.erase("hash");
      if (found == wanted && hash.size() == 32) return hash;
    } catch (const Error&) {  // incomplete, or of another version: ignored
    }
  }
  const std::string hash = hash_content(file);
  if (read_file_stamp(file) != before) raise_changed(file);
  // Times have a coarse resolution: a file written just now could change again within the same time stamp. So a hash is
  // remembered only for files that were last changed over 2 s ago.
  constexpr int64_t kSettledNs = 2'000'000'000;
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  const int64_t now_ns = now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
  if (!known.empty() && now_ns - std::max(before.modified_ns, before.changed_ns) > kSettledNs) {
    Json remembered = wanted;
    remembered["hash"] = hash;
    try {
      make_folders(known.parent_path());
      publish_file(known, remembered.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
    } catch (const Error& error) {  // the next start hashes the data again
      log_debug("{}", error.what());
    }
  }
  return hash;
}

// The entry is looked up without a lock, then again with the key's lock, because another process may have made it in
// between. It is written into a staged folder and renamed, so a reader sees a complete entry or no entry. Without locks
// (or on several hosts) two processes may write at the same time; the rename of the second process then fails, and it
// uses the entry of the first one.
std::shared_ptr<const PackedRows> DataCache::open_or_make(const std::string& key,
                                                          const std::function<void(const fs::path&)>& make,
                                                          const std::atomic<bool>* stop) const {
  std::string reason;
  const auto open_made = [&](const fs::path& folder) {
    auto rows = PackedRows::open(folder, key, &reason);
    TESSERA_CHECK(rows != nullptr, ErrorKind::kIo,
                  "[data.cache] {}: the entry that was just written cannot be read: {}", folder.string(),
                  reason.empty() ? "it is missing" : reason);
    return rows;
  };
  if (folder_.empty()) {
    const ScratchFolder scratch("data.cache");
    make(scratch.path());
    return open_made(scratch.path());
  }
  const auto folder = folder_ / key;
  if (auto rows = PackedRows::open(folder, key)) return rows;
  make_folders(folder_);
  const KeyLock lock(folder_ / (key + ".lock"), folder.string(), stop);
  if (auto rows = PackedRows::open(folder, key, &reason)) return rows;
  if (!reason.empty()) {
    log_warning("{} The entry is made again.", reason);
    replace_entry(folder);
  }
  if (lock.held()) remove_staged(folder_, key);
  {
    StagedFolder staged(folder);
    publish_file(staged.path() / kMakerName, host_name());
    make(staged.path());
    if (auto rows = PackedRows::open(folder, key)) return rows;  // another host was faster
    try {
      staged.publish();
    } catch (const Error&) {
      if (auto rows = PackedRows::open(folder, key)) return rows;
      throw;
    }
  }
  auto rows = open_made(folder);
  prune();
  return rows;
}

// Removes the entries used least recently first. If locks do not reach all hosts, a process cannot see that another
// host has an entry open. Then only entries that this host has made and that were not used for limits_.age are removed.
void DataCache::prune() const {
  const bool locks_count = limits_.locks_reach_all_hosts.value_or(locks_reach_all_hosts(folder_));
  std::vector<CacheEntry> entries;
  uint64_t bytes = 0;
  for (const auto& found : entries_of(folder_)) {
    if (!key_of_leftover(found.filename().string()).empty()) {
      prune_leftover(found, locks_count);
    } else if (auto entry = read_cache_entry(found)) {
      bytes += entry->bytes;
      entries.push_back(std::move(*entry));
    }
  }
  std::ranges::sort(entries, [](const auto& a, const auto& b) { return a.used < b.used; });
  const auto now = std::chrono::system_clock::now();
  for (const auto& entry : entries) {
    const bool old = now - entry.used > limits_.age;
    if (!old && bytes <= limits_.bytes) continue;
    if (!locks_count && (!old || entry.maker != host_name())) continue;
    if (!remove_unused(entry.folder)) continue;
    bytes -= entry.bytes;
    log_info("[data.cache] {}: removed, {}", entry.folder.string(),
             old ? "as it was not used for long" : "to make room for entries used more recently");
  }
}

void DataCache::prune_leftover(const fs::path& path, bool locks_count) const {
  const auto name = path.filename().string();
  UniqueFd lock;
  bool gone = false;
  if (name.ends_with(".tmp")) {
    lock = open_to_lock(folder_ / (key_of_leftover(name) + ".lock"), O_NOFOLLOW);
    gone = is_abandoned(path, lock.open() && try_lock(lock) == LockState::kHeld);
  } else {
    gone = (locks_count && is_unused(path, lock)) || untouched_for(path) > limits_.age;
  }
  std::error_code ignored;
  if (gone) fs::remove_all(path, ignored);
}

}  // namespace tessera::data
