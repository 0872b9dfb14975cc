// Shuffled order without a table: a permutation of 0 .. size-1 that is a function of seed and epoch alone.
//
//   int64_t row = permuted(index, size, seed, epoch);
//
// Every rank computes the same order from the same numbers, whatever their number. Thread-safe.
#pragma once

#include <cstdint>

namespace tessera::data {

// A Feistel network of 8 rounds over the next even number of bits; values beyond the size are walked on.
int64_t permuted(int64_t index, int64_t size, uint64_t seed, uint64_t epoch);

}  // namespace tessera::data
