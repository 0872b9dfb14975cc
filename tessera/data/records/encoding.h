// Whether a file of training text is what the tokenizer takes it for: UTF-8.
//
//   check_encoding(content, path);  // UTF-16 or Latin-1 would train on letters with zero bytes, or on U+FFFD
//
// Pure, thread-safe.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>

namespace tessera::data {

// `offset`: where in the file `content` begins; what tells UTF-16 is looked for at the front only. Error kFormat names
// the file, the encoding it seems to have and the first byte that is no UTF-8, or the zero byte. A byte order mark of
// UTF-8 is fine.
void check_encoding(std::string_view content, const std::filesystem::path& path, uint64_t offset = 0);

}  // namespace tessera::data
