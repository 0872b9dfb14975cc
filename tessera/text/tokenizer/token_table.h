// A hash table from token string to id, with open addressing. It owns the strings. Immutable and thread-safe.
#pragma once

#include <xxhash.h>

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::text {

class TokenTable {
 public:
  static constexpr int32_t kNone = -1;

  // A token that is given twice has the id given last.
  explicit TokenTable(std::vector<std::pair<std::string, int32_t>> tokens) : tokens_(std::move(tokens)) {
    slots_.assign(std::bit_ceil(tokens_.size() * 2 + 2), 0);
    for (uint32_t i = 0; i < tokens_.size(); ++i) {
      uint32_t& slot = slots_[slot_of(tokens_[i].first)];
      distinct_ += slot == 0;
      slot = i + 1;
    }
  }
  int32_t find(std::string_view token) const {
    const uint32_t entry = slots_[slot_of(token)];
    return entry == 0 ? kNone : tokens_[entry - 1].second;
  }
  const std::vector<std::pair<std::string, int32_t>>& tokens() const { return tokens_; }
  size_t distinct() const { return distinct_; }

 private:
  // The slot of the token, or the empty slot at which it would be inserted. The table is at most half full, so there is
  // always an empty slot.
  size_t slot_of(std::string_view token) const {
    const size_t mask = slots_.size() - 1;
    size_t slot = XXH3_64bits(token.data(), token.size()) & mask;
    while (slots_[slot] != 0 && tokens_[slots_[slot] - 1].first != token) slot = (slot + 1) & mask;
    return slot;
  }

  std::vector<std::pair<std::string, int32_t>> tokens_;
  std::vector<uint32_t> slots_;  // 1 + an index into tokens_; 0: empty
  size_t distinct_ = 0;
};

}  // namespace tessera::text
