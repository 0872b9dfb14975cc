// Reads the bytes of a file in order, and inflates a gzip file.
//
//   auto stream = ByteStream::open("train.jsonl.gz");
//   while (const size_t count = stream->read(buffer)) ...
//
// Memory does not depend on the size of the file: 64 KiB are read at a time, and only the requested bytes are inflated.
// A stream belongs to one thread.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>

namespace tessera::data {

class ByteStream {
 public:
  // Opens the file `path`. If its first two bytes are those of gzip, read() returns the decompressed bytes; the name of
  // the file does not matter. Error kIo when the file cannot be opened or is not a regular file.
  static std::unique_ptr<ByteStream> open(const std::filesystem::path& path);
  virtual ~ByteStream() = default;

  // Fills the buffer and returns the number of bytes: fewer only at the end of the file, 0 when nothing is left.
  // Errors: kIo; kFormat for gzip that is damaged, cut off or followed by other data.
  virtual size_t read(std::span<char> buffer) = 0;
};

}  // namespace tessera::data
