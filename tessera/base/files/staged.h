// Files and folders that appear whole or not at all under their name.
//
//   StagedFile file(path);                 // writes a temporary file next to PATH
//   file.write_at(0, bytes);
//   file.publish();                        // fsync, rename over PATH, fsync of the folder
//
//   StagedFolder folder(dir);              // DIR must not exist, or be an empty folder
//   publish_file(folder.path() / "config.json", text);
//   folder.publish();
//
// The temporary name, .NAME.RANDOM.tmp, is always created new: an existing file is never opened and a link is never
// followed. Without publish() the destructor removes the temporary file or folder; after a kill it remains under the
// temporary name. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "tessera/base/files/unique_fd.h"

namespace tessera {

class StagedFile {
 public:
  // Creates the temporary file for `path`. `staging` is the folder of the temporary file and must be on the file system
  // of `path`; if `staging` is empty, the temporary file is in the folder of `path`. Error kIo when the temporary file
  // cannot be created.
  explicit StagedFile(std::filesystem::path path, const std::filesystem::path& staging = {});
  ~StagedFile();
  StagedFile(const StagedFile&) = delete;
  StagedFile& operator=(const StagedFile&) = delete;

  // Writes bytes at a position, in any order. Bytes that are never written read as zero. Error kIo, e.g. for a full
  // disk.
  void write_at(uint64_t offset, std::span<const std::byte> bytes);
  // Makes the file visible under PATH. Error kIo.
  void publish();
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  std::filesystem::path staged_;
  UniqueFd file_;
};

class StagedFolder {
 public:
  // Creates the temporary folder in the parent folder of `dir`. Error kIo when `dir` exists and is not an empty folder,
  // or when its parent folder cannot be written.
  explicit StagedFolder(const std::filesystem::path& dir);
  ~StagedFolder();
  StagedFolder(const StagedFolder&) = delete;
  StagedFolder& operator=(const StagedFolder&) = delete;

  // The folder to write into until publish().
  const std::filesystem::path& path() const { return staged_; }
  // Renames the folder path() to the constructor's argument `dir`, so that all its files appear under this name at
  // once. Error kIo.
  void publish();

 private:
  std::filesystem::path dir_;
  std::filesystem::path staged_;
  bool published_ = false;
};

// publish_file() of file.h with a temporary file in the folder `staging`, on the same file system.
void publish_file(const std::filesystem::path& path, std::string_view content, const std::filesystem::path& staging);

// Calls `make` with new names .STEM.RANDOM.tmp in `folder` until one is created, and returns that name. `make` returns
// 0 or errno; EEXIST leads to another name. Error kIo for any other errno.
std::filesystem::path create_temporary(const std::filesystem::path& folder, const std::string& stem,
                                       const std::function<int(const std::filesystem::path&)>& make);

}  // namespace tessera
