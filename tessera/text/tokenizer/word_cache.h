// A cache of the ids of short words: a two-way set-associative table of fixed size with one 64-byte cache line per
// word. No memory is allocated per word.
//
//   const auto key = WordCache::key_of(word, word.size());
//   if (const auto* hit = cache.find(key)) out.insert(out.end(), hit->ids, hit->ids + hit->count);
//
// A cache belongs to one thread at a time.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string_view>

namespace tessera::text {

class WordCache {
 public:
  static constexpr size_t kMaxBytes = 30;
  static constexpr size_t kMaxIds = 8;

  struct alignas(64) Entry {
    uint8_t bytes;         // length of the word; 0: the entry is empty
    uint8_t count;         // number of ids
    char word[kMaxBytes];  // zero-padded
    int32_t ids[kMaxIds];
  };
  static_assert(sizeof(Entry) == 64);

  // The first 32 bytes of an Entry, with 0 in place of `count`.
  struct Key {
    uint64_t parts[4];
  };

  WordCache() : entries_(std::make_unique<Entry[]>(kEntries)) {}

  // word.size() must be 1 .. kMaxBytes. The caller guarantees that `readable` bytes from word.data() on may be read. If
  // `readable` is at least kMaxBytes, key_of() copies kMaxBytes bytes, whatever the size of the word, and then clears
  // the bytes behind the word. This is faster than a copy of variable size.
  static Key key_of(std::string_view word, size_t readable) {
    Key key{};
    auto* bytes = reinterpret_cast<char*>(&key);
    bytes[0] = static_cast<char>(word.size());
    if (readable >= kMaxBytes) {
      std::memcpy(bytes + 2, word.data(), kMaxBytes);
      const size_t used_bits = (word.size() + 2) * 8;
      for (size_t i = 0; i < 4; ++i) {
        const size_t first = i * 64;
        if (used_bits <= first) {
          key.parts[i] = 0;
        } else if (used_bits < first + 64) {
          key.parts[i] &= (uint64_t{1} << (used_bits - first)) - 1;
        }
      }
    } else {
      std::memcpy(bytes + 2, word.data(), word.size());
    }
    return key;
  }

  const Entry* find(const Key& key) const {
    const Entry* pair = &entries_[index_of(key)];
    if (matches(pair[0], key)) return &pair[0];
    return matches(pair[1], key) ? &pair[1] : nullptr;
  }

  void insert(const Key& key, std::span<const int32_t> ids) {
    if (ids.size() > kMaxIds) return;
    Entry* pair = &entries_[index_of(key)];
    if (pair[0].bytes != 0) pair[1] = pair[0];  // replaces the older of the two entries
    Key stored = key;
    reinterpret_cast<uint8_t*>(&stored)[1] = static_cast<uint8_t>(ids.size());
    std::memcpy(static_cast<void*>(&pair[0]), &stored, sizeof stored);
    std::memcpy(pair[0].ids, ids.data(), ids.size_bytes());
  }

 private:
  static constexpr size_t kEntries = size_t{1} << 15;

  static size_t index_of(const Key& key) {
    uint64_t hash = (key.parts[0] ^ 0x9E3779B97F4A7C15u) * 0xD6E8FEB86659FD93u;
    hash = (hash ^ (hash >> 32) ^ key.parts[1]) * 0xD6E8FEB86659FD93u;
    hash = (hash ^ (hash >> 32) ^ key.parts[2]) * 0xD6E8FEB86659FD93u;
    hash = (hash ^ (hash >> 32) ^ key.parts[3]) * 0xD6E8FEB86659FD93u;
    return (hash >> 40) & (kEntries - 2);
  }
  static bool matches(const Entry& entry, const Key& key) {
    Key stored;
    std::memcpy(&stored, static_cast<const void*>(&entry), sizeof stored);
    return ((stored.parts[0] & ~uint64_t{0xFF00}) == key.parts[0]) & (stored.parts[1] == key.parts[1]) &
           (stored.parts[2] == key.parts[2]) & (stored.parts[3] == key.parts[3]);
  }

  std::unique_ptr<Entry[]> entries_;
};

}  // namespace tessera::text
