// A shuffled order without a table: a permutation of 0 .. size-1 that depends on seed and epoch alone.
//
//   int64_t row = permuted_index(index, size, seed, epoch);
//
// Every rank computes the same order, for any number of ranks. Thread-safe.
#pragma once

#include <cstdint>

namespace tessera::data {

// The position of `index` in the permutation. Computed by a Feistel network of 8 rounds with cycle walking.
int64_t permuted_index(int64_t index, int64_t size, uint64_t seed, uint64_t epoch);

}  // namespace tessera::data
