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

// `offset` is the position of `content` in the file; UTF-16 is looked for only at offset 0. Error kFormat names the
// file, the encoding that it seems to have, and the first byte that is not UTF-8 or is zero. A byte order mark of UTF-8
// is accepted.
void check_encoding(std::string_view content, const std::filesystem::path& path, uint64_t offset = 0);

}  // namespace tessera::data
