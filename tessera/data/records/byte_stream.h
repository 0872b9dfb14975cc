// The bytes of a file from front to back, inflated where it is gzip's.
//
//   auto stream = ByteStream::open("train.jsonl.gz");
//   while (const size_t count = stream->read(buffer)) ...
//
// Memory does not depend on the file: 64 KiB are read at a time, and what is asked for is inflated, no more. One stream
// belongs to one thread.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>

namespace tessera::data {

class ByteStream {
 public:
  // Gzip is told by its first two bytes, not by the name. Error kIo when the file cannot be opened or is no regular
  // file.
  static std::unique_ptr<ByteStream> open(const std::filesystem::path& path);
  virtual ~ByteStream() = default;

  // Fills the buffer, or less of it at the end; 0: nothing is left. Error kIo; kFormat for gzip that is damaged, cut
  // off or followed by something else.
  virtual size_t read(std::span<char> buffer) = 0;
};

}  // namespace tessera::data
