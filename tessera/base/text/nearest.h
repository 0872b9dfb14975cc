// Finds the word that a user probably meant, for "did you mean" in error messages.
//
//   nearest("max_new_token", {"max_new_tokens", "seed"})   // "max_new_tokens"
//
// Pure, thread-safe. Words are cut at 64 bytes, so hostile input costs little.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

namespace tessera {

// The number of insertions, deletions, substitutions and swaps of neighbours (optimal string alignment) from a to b.
size_t edit_distance(std::string_view a, std::string_view b);

// The candidate with the smallest edit_distance(), the first of those with an equal distance; empty without candidates.
std::string_view nearest(std::string_view word, std::span<const std::string_view> candidates);

}  // namespace tessera
