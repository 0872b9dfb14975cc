// The text of a file, checked to be UTF-8 as it comes, inflated where it is gzip's.
//
//   TextStream stream(path);
//   std::string text;
//   while (stream.more(text)) ...                 // text grows by whole characters
//
// A byte order mark at the front is left out. Not thread-safe.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "tessera/data/records/byte_stream.h"

namespace tessera::data {

class TextStream {
 public:
  explicit TextStream(const std::filesystem::path& path) : path_(path), bytes_(ByteStream::open(path)) {}

  // Appends about a MiB; false when nothing is left. Error kFormat names the byte (of what was inflated) that is no
  // UTF-8, and the encoding that it seems to be.
  bool more(std::string& text);
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  std::unique_ptr<ByteStream> bytes_;
  std::string begun_;    // the front of a character whose rest is yet to come
  uint64_t offset_ = 0;  // of begun_
};

}  // namespace tessera::data
