// Files and folders that appear whole or not at all.
//
//   StagedFile file(path);                 // written as PATH.tmp.PID beside it
//   file.write_at(0, bytes);
//   file.publish();                        // fsync, rename over PATH, fsync of the folder
//
//   StagedFolder folder(dir);              // DIR must not exist, or be an empty folder
//   publish_file(folder.path() / "config.json", text);
//   folder.publish();
//
// Without publish() the destructor removes what was staged. One object belongs to one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>

namespace tessera {

class StagedFile {
 public:
  // Error kIo when the temporary file cannot be created.
  explicit StagedFile(std::filesystem::path path);
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
  int fd_ = -1;
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

}  // namespace tessera
