// Keeps tokenized data between runs, under a key that depends on everything that the rows depend on.
//
//   const DataCache cache(DataCache::folder_of("auto"));
//   const UnchangedFiles files(paths);  // before any of them is read
//   auto rows = cache.open_or_make(key, [&](const std::filesystem::path& folder) {
//     write(folder);
//     files.check();
//   });
//
// An entry is a folder (packed_rows.h). Its key is the hash of the inputs: contents of the files, tokenizer, template,
// settings, and the version of the code that makes rows.
//
// Making: an entry appears whole or not at all. One process makes it; other processes wait. Hosts that share the folder
// but not its locks may make the same entry at the same time; the entry that is finished first is used by all. An entry
// that is incomplete, or of another version or key, is made again.
//
// Removing: after a new entry was made, entries that were not used for CacheLimits::age, the least recently used
// entries beyond CacheLimits::bytes, and unfinished entries of killed processes are removed. An entry that a process
// has open is never removed. Where hosts may not see the locks of other hosts (cache_lock.h), a host removes only
// entries that it made itself and that were not used for CacheLimits::age.
//
// The hash of a file's contents is remembered with its path, size and times, so a second start reads no data.
// Thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/data/rows/packed_rows.h"

namespace tessera::data {

// Properties of a file that change when it is written to.
struct FileStamp {
  uint64_t device = 0, inode = 0;
  int64_t size = 0, modified_ns = 0, changed_ns = 0;
  bool operator==(const FileStamp&) const = default;
};
// Returns the FileStamp of the file `path`, or of its target if it is a symbolic link. Error kIo if stat(2) fails, for
// example because the file is missing.
FileStamp read_file_stamp(const std::filesystem::path& path);

// Stores the FileStamp of each file and detects later changes of the files.
class UnchangedFiles {
 public:
  explicit UnchangedFiles(std::vector<std::filesystem::path> files);
  // Compares the FileStamp of each file with the one that the constructor stored. Error kConfig if they differ for a
  // file; the message names the first such file. Error kIo if a file is missing.
  void check() const;
  // Returns the first of the files that was written to or deleted after the constructor stored its FileStamp; nullopt
  // if there is none. A new owner, mode or hard link of a file does not count.
  std::optional<std::filesystem::path> changed() const;

 private:
  std::vector<std::filesystem::path> files_;
  std::vector<FileStamp> stamps_;
};

struct CacheLimits {
  std::chrono::seconds age = std::chrono::hours(24 * 30);  // since the last use
  uint64_t bytes = uint64_t{128} << 30;                    // of all entries together
  std::optional<bool> locks_reach_all_hosts{};             // unset: decided by the folder's file system
};

class DataCache {
 public:
  // If `folder` is empty, no entry is kept: open_or_make() makes the entry in a temporary folder, opens it and deletes
  // the folder.
  explicit DataCache(std::filesystem::path folder, CacheLimits limits = {})
      : folder_(std::move(folder)), limits_(limits) {}
  // "auto": tessera/data in $XDG_CACHE_HOME, else in ~/.cache. "off": an empty path. Any other setting is the folder
  // itself. If the folder of "auto" cannot be written, the result is empty, with a warning.
  static std::filesystem::path folder_of(const std::string& setting);

  // Opens the entry of this key. If the entry does not exist, `make` is called with an empty folder first. Errors:
  // those of `make`; kIo, also for an existing entry that cannot be opened or read (too many open files, a broken
  // disk); kInternal when `stop` becomes true while another process makes the entry.
  std::shared_ptr<const PackedRows> open_or_make(const std::string& key,
                                                 const std::function<void(const std::filesystem::path&)>& make,
                                                 const std::atomic<bool>* stop = nullptr) const;
  // Hash of a file's contents, in hexadecimal. Errors: kIo; kConfig when the file changes while it is read.
  std::string content_hash(const std::filesystem::path& file) const;
  // Removes entries beyond the limits that no process has open, and unfinished entries of killed processes. Other
  // folders are not touched. Failures are ignored.
  void prune() const;

 private:
  // Removes a staged entry that will never be finished, or a replaced entry that is not in use.
  void prune_leftover(const std::filesystem::path& path, bool locks_count) const;

  std::filesystem::path folder_;
  CacheLimits limits_;
};

}  // namespace tessera::data
