#include "tessera/data/rows/shuffle.h"

#include <bit>

namespace tessera::data {
namespace {

// The finalizer of SplitMix64.
uint64_t mixed(uint64_t x) {
  x += 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

}  // namespace

// A Feistel network is a permutation of all values of 2 * half bits, whatever its round function is. A result of `size`
// or more is permuted again until it is below (cycle walking), which restricts the permutation to 0 .. size - 1. The
// domain is less than 4 * size, so fewer than 4 steps are expected.
int64_t permuted_index(int64_t index, int64_t size, uint64_t seed, uint64_t epoch) {
  if (size <= 1) return 0;
  const int half = (std::bit_width(static_cast<uint64_t>(size - 1)) + 1) / 2;
  const uint64_t mask = (uint64_t{1} << half) - 1;
  const uint64_t key = mixed(mixed(seed) ^ epoch);
  auto value = static_cast<uint64_t>(index);
  do {
    uint64_t left = value >> half, right = value & mask;
    for (uint64_t round = 0; round < 8; ++round) {
      const uint64_t next = left ^ (mixed(key + (round << 56) + right) & mask);
      left = right;
      right = next;
    }
    value = (left << half) | right;
  } while (value >= static_cast<uint64_t>(size));
  return static_cast<int64_t>(value);
}

}  // namespace tessera::data
