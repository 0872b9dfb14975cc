// A read-only memory map of a whole file.
//
//   auto file = MappedFile::open(path);
//   parse(file->bytes());
//
// A file that another program makes shorter, or that its disk cannot give, raises SIGBUS where the missing bytes are
// read. A program that calls report_cut_files() ends then with a message that names the file.
//
// The map lives as long as the object; tensors that look into it keep the shared_ptr. Thread-safe after open.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>

namespace tessera {

class MappedFile {
 public:
  // Error kIo when the file cannot be opened, is no regular file or cannot be mapped. An empty file maps to an empty
  // span.
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

// From here on a SIGBUS in a map of this process says on stderr which file it was, and ends the process with the exit
// code of kIo; any other SIGBUS is what it was. Of more than 4,096 maps the later ones stay unnamed. Once a process.
void report_cut_files();

}  // namespace tessera
