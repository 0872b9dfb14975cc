// A read-only memory map of a whole file.
//
//   auto file = MappedFile::open(path);
//   parse(file->bytes());
//
// If another program makes the file shorter, or its disk fails, a read of the missing bytes raises SIGBUS. In a program
// that has called report_cut_files(), the process then ends with a message that names the file.
//
// The map lives as long as the object. Tensors that are views of it keep the shared_ptr. Thread-safe after open().
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>

namespace tessera {

class MappedFile {
 public:
  // Maps the file `path`. Error kIo when the file cannot be opened, is not a regular file or cannot be mapped. For an
  // empty file bytes() is empty.
  static std::shared_ptr<const MappedFile> open(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_bytes_}; }
  const std::filesystem::path& path() const { return path_; }

 private:
  MappedFile(std::filesystem::path path, const std::byte* data, size_t size_bytes)
      : path_(std::move(path)), data_(data), size_bytes_(size_bytes) {}
  std::filesystem::path path_;
  const std::byte* data_;
  size_t size_bytes_;
};

// Installs a SIGBUS handler for the process; call it once. A SIGBUS in a map prints the name of the file to stderr and
// ends the process with the exit code of kIo; any other SIGBUS has its default effect. With more than 4,096 maps,
// faults in later maps are not recognised.
void report_cut_files();

}  // namespace tessera
