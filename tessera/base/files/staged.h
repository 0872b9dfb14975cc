// Files and folders that appear whole or not at all.
//
//   StagedFile file(path);                 // written under a name of its own beside it
//   file.write_at(0, bytes);
//   file.publish();                        // fsync, rename over PATH, fsync of the folder
//
//   StagedFolder folder(dir);              // DIR must not exist, or be an empty folder
//   publish_file(folder.path() / "config.json", text);
//   folder.publish();
//
// The name under which something is staged, .NAME.RANDOM.tmp, is nobody else's: it is made new, never opened, and a
// link is never followed. Without publish() the destructor removes what was staged; what a killed process leaves keeps
// its name. One object belongs to one thread.
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
  // `staging`: the folder of the temporary file, on PATH's file system; empty: beside PATH. Error kIo when it cannot be
  // created.
  explicit StagedFile(std::filesystem::path path, const std::filesystem::path& staging = {});
  ~StagedFile();
  StagedFile(const StagedFile&) = delete;
  StagedFile& operator=(const StagedFile&) = delete;

  // Bytes at a position, in any order; what is never written reads as zero. Error kIo, a full disk among them.
  void write_at(uint64_t offset, std::span<const std::byte> bytes);
  void publish();
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  std::filesystem::path staged_;
  UniqueFd file_;
};

class StagedFolder {
 public:
  // Error kIo when DIR holds something already or its parent cannot be written.
  explicit StagedFolder(const std::filesystem::path& dir);
  ~StagedFolder();
  StagedFolder(const StagedFolder&) = delete;
  StagedFolder& operator=(const StagedFolder&) = delete;

  // The folder to write into until publish().
  const std::filesystem::path& path() const { return staged_; }
  void publish();

 private:
  std::filesystem::path dir_;
  std::filesystem::path staged_;
  bool published_ = false;
};

// publish_file() of file.h, staged in a folder of the same file system.
void publish_file(const std::filesystem::path& path, std::string_view content, const std::filesystem::path& staging);

// A name in `folder` that `make` has just made: .STEM.RANDOM.tmp. `make` returns 0, or errno; after EEXIST another name
// is tried. Error kIo.
std::filesystem::path make_new(const std::filesystem::path& folder, const std::string& stem,
                               const std::function<int(const std::filesystem::path&)>& make);

}  // namespace tessera
