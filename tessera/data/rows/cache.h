// Where tokenized data is kept between runs, and what it is kept under.
//
//   const DataCache cache(DataCache::folder_of("auto"));
//   const UnchangedFiles files(paths);  // before anything of them is read
//   auto rows = cache.find_or_make(key, [&](const std::filesystem::path& folder) {
//     write(folder);
//     files.check();
//   });
//
// An entry is a folder (packed_rows.h) under the hash of what it was made from: the files' content, tokenizer,
// template, settings, and the version of what makes rows. It appears whole or not at all, and is made by one process at
// a time; the others wait for it. Hosts that share the folder without sharing its locks may make the same entry at
// once: the first one counts. One that is cut off, of another version or of another key is made again. When an entry
// has been made, those that nobody has used for long, and the oldest beyond a size, go, with what killed processes
// left; never one that a process has open. Where hosts may not see one another's locks (cache_lock.h), a host removes
// only what it has made itself and nobody has used for long. What a file's content is is remembered by its place, size
// and times, so that a second start reads no data. Thread-safe.
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

// What changes when a file is written to.
struct FileState {
  uint64_t device = 0, inode = 0;
  int64_t size = 0, modified_ns = 0, changed_ns = 0;
  bool operator==(const FileState&) const = default;
};
// Error kIo.
FileState state_of(const std::filesystem::path& path);

class UnchangedFiles {
 public:
  explicit UnchangedFiles(std::vector<std::filesystem::path> files);
  // Error kConfig names the first that has been written to since.
  void check() const;
  // The first that has been written to, or is gone; another owner, mode or link is no change.
  std::optional<std::filesystem::path> changed() const;

 private:
  std::vector<std::filesystem::path> files_;
  std::vector<FileState> states_;
};

struct CacheLimits {
  std::chrono::seconds age = std::chrono::hours(24 * 30);  // since the last use
  uint64_t bytes = uint64_t{128} << 30;
  std::optional<bool> locks_reach_all_hosts{};  // unset: as the file system of the folder has it
};

class DataCache {
 public:
  // Without a folder nothing is kept: entries are made in a temporary folder that is gone with them.
  explicit DataCache(std::filesystem::path folder, CacheLimits limits = {})
      : folder_(std::move(folder)), limits_(limits) {}
  // "auto": tessera/data in $XDG_CACHE_HOME, else in ~/.cache; "off": none; anything else is the folder. Where "auto"
  // cannot be written it is none, with a warning.
  static std::filesystem::path folder_of(const std::string& setting);

  // The entry of this key, made by `make` in an empty folder where there is none. Error as make's; kIo, among them one
  // that is there and cannot be read for want of descriptors or by a broken disk; kInternal when `stop` becomes true
  // while another process makes it.
  std::shared_ptr<const PackedRows> find_or_make(const std::string& key,
                                                 const std::function<void(const std::filesystem::path&)>& make,
                                                 const std::atomic<bool>* stop = nullptr) const;
  // Hash of what a file holds, in hexadecimal. Error kIo; kConfig when it changes meanwhile.
  std::string content_hash(const std::filesystem::path& file) const;
  // Removes what is beyond the limits and that nobody has open: folders that are entries of ours, nothing else. What
  // cannot be removed stays.
  void prune() const;

 private:
  // What is staged, or was moved out of the way, by a process that is gone.
  void prune_leftover(const std::filesystem::path& path, bool locks_count) const;

  std::filesystem::path folder_;
  CacheLimits limits_;
};

}  // namespace tessera::data
