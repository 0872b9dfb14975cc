// Words that nobody guesses.
//
//   const std::string word = random_word(16);   // 32 hexadecimal digits
//
// Thread-safe.
#pragma once

#include <cstddef>
#include <string>

namespace tessera {

// Two digits a byte, from the kernel. Error kIo where it has none.
std::string random_word(size_t bytes);

}  // namespace tessera
