// Counts the owners (sequences) of each page of a KV cache (nn/attention/paged_cache.h), and finds pages by their
// tokens.
//
//   PagePool pages(1024);
//   auto page = pages.find(PagePool::kEmptyPrefix, first_16_tokens);   // computed before by another sequence: shared
//   if (!page) page = pages.allocate();                                // nullopt when every page has an owner
//   auto prefix = pages.publish(*page, PagePool::kEmptyPrefix, first_16_tokens);   // after its tokens are computed
//   pages.find(prefix, next_16_tokens);
//
// A page is found by its tokens and all tokens before them; the tokens themselves are compared, not only a hash. A
// published page without owner keeps its content until allocate() needs a page; the least recently used page is reused
// first. The class stores page numbers and token ids, not keys and values. Not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "tessera/kernels/attention/paged_attention.h"

namespace tessera {

class PagePool {
 public:
  using PrefixId = uint64_t;  // identifies the list of all tokens before a page
  static constexpr PrefixId kEmptyPrefix = 0;

  explicit PagePool(int64_t count);

  // Returns an unpublished page with one owner; nullopt when every page has an owner.
  std::optional<int32_t> allocate();
  // Returns the published page with these kernels::kPageTokens tokens after `prefix`, and adds an owner to it; nullopt
  // when there is no such page.
  std::optional<int32_t> find(PrefixId prefix, std::span<const int64_t> tokens);
  // Publishes a page, so that find() returns it, and returns the prefix that ends with it. When another page holds the
  // same tokens, this page stays private and the other page's prefix is returned.
  PrefixId publish(int32_t page, PrefixId prefix, std::span<const int64_t> tokens);
  PrefixId prefix_with(int32_t page) const { return pages_[static_cast<size_t>(page)].prefix; }
  void release(int32_t page);

  int64_t count() const { return static_cast<int64_t>(pages_.size()); }
  int64_t pages_in_use() const { return pages_in_use_; }

 private:
  struct Key {
    PrefixId prefix;
    std::array<int64_t, kernels::kPageTokens> tokens;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    size_t operator()(const Key& key) const;
  };
  struct Page {
    int64_t ref_count = 0;
    PrefixId prefix = kEmptyPrefix;  // of a published page: the tokens before it and its own
    std::optional<Key> key{};
    std::list<int32_t>::iterator lru_position{};  // iterator in lru_ of a published page without owner
  };
  static Key key_of(PrefixId prefix, std::span<const int64_t> tokens);

  std::vector<Page> pages_;
  std::vector<int32_t> free_;
  std::list<int32_t> lru_;  // least recently used first
  std::unordered_map<Key, int32_t, Hash> published_;
  PrefixId next_prefix_ = kEmptyPrefix + 1;
  int64_t pages_in_use_ = 0;
};

}  // namespace tessera
