// A read-only memory map of a whole file.
//
//   auto file = MappedFile::open(path);
//   parse(file->bytes());
//
// The map lives as long as the object; tensors that look into it keep the shared_ptr. Thread-safe after open.
#pragma once

#include <cstddef>
#include <cstdint>
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

}  // namespace tessera
