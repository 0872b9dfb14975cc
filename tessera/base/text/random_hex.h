// Random hexadecimal digits that cannot be guessed.
//
//   const std::string token = random_hex(16);   // 32 hexadecimal digits
//
// Thread-safe.
#pragma once

#include <cstddef>
#include <string>

namespace tessera {

// Two hexadecimal digits for each byte, from the kernel's random numbers. Error kIo when they are not available.
std::string random_hex(size_t bytes);

}  // namespace tessera
