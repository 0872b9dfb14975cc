// SipHash-2-4 of Aumasson and Bernstein, "SipHash: a fast short-input PRF": a keyed hash of short messages. Without the
// key the hash of a new message cannot be computed or guessed.
//
//   const uint64_t word = siphash({low, high}, message);      // with a key of 128 bits
//
// Pure and thread-safe.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>

namespace tessera {

using SipKey = std::array<uint64_t, 2>;

inline uint64_t siphash(const SipKey& key, std::string_view message) {
  uint64_t a = key[0] ^ 0x736f6d6570736575, b = key[1] ^ 0x646f72616e646f6d;
  uint64_t c = key[0] ^ 0x6c7967656e657261, d = key[1] ^ 0x7465646279746573;
  const auto rounds = [&](int count) {
    for (; count > 0; --count) {
      a += b, c += d;
      b = std::rotl(b, 13) ^ a, d = std::rotl(d, 16) ^ c;
      a = std::rotl(a, 32);
      c += b, a += d;
      b = std::rotl(b, 17) ^ c, d = std::rotl(d, 21) ^ a;
      c = std::rotl(c, 32);
    }
  };
  const auto absorb = [&](uint64_t word) {
    d ^= word;
    rounds(2);
    a ^= word;
  };
  uint64_t word = 0;
  for (size_t i = 0; i < message.size(); ++i) {
    word |= uint64_t{static_cast<unsigned char>(message[i])} << (8 * (i % 8));
    if (i % 8 == 7) absorb(std::exchange(word, 0));
  }
  absorb(word | uint64_t{message.size()} << 56);
  c ^= 0xff;
  rounds(4);
  return a ^ b ^ c ^ d;
}

}  // namespace tessera
