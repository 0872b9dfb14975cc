// Checks that training text is UTF-8, the encoding that the tokenizer expects.
//
//   check_encoding(content, path);  // without this, UTF-16 or Latin-1 would train on zero bytes or on U+FFFD
//
// Pure, thread-safe.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>

namespace tessera::data {

// Error kFormat if `content` is not UTF-8 text. The message names the file and the encoding or file type that it seems
// to have; for an encoding also the first byte that is wrong. `offset` is the position of `content` in the file. Other
// file types (such as zip), UTF-16 and UTF-32 are looked for only at offset 0. A byte order mark of UTF-8 is accepted.
void check_encoding(std::string_view content, const std::filesystem::path& path, uint64_t offset = 0);

}  // namespace tessera::data
