// Reads the text of a file, checks that it is UTF-8, and inflates a gzip file.
//
//   TextFileReader reader(path);
//   std::string text;
//   while (reader.read_more(text)) ...            // text grows by whole characters
//
// A byte order mark at the front is removed. Not thread-safe.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "tessera/data/records/byte_stream.h"

namespace tessera::data {

class TextFileReader {
 public:
  explicit TextFileReader(const std::filesystem::path& path) : path_(path), bytes_(ByteStream::open(path)) {}

  // Appends the next part of the (inflated) text, about 1 MiB, to `text`. Returns false when nothing is left. Error
  // kFormat names the first byte of the inflated text that is not UTF-8, and the encoding that the file seems to have.
  bool read_more(std::string& text);
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  std::unique_ptr<ByteStream> bytes_;
  std::string cut_character_;  // first bytes of a character that continues in the next chunk
  uint64_t offset_ = 0;        // position of cut_character_ in the text
};

}  // namespace tessera::data
