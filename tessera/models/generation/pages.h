// The owners of the pages of a KV cache (nn/attention/paged_cache.h).
//
//   Pages pages(1024);
//   auto page = pages.find(Pages::kStart, first_16_tokens);     // computed before by another sequence: shared
// nullopt when every page has an owner
// after all its tokens are computed
//   pages.find(place, next_16_tokens);
//
// A page is found by its tokens and all tokens before it, which are compared one by one. A published page without owner
// is kept until its memory is needed; the least recently used page is reused first. The class stores integers only. One
// thread at a time.
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

class Pages {
 public:
  using Place = uint64_t;  // stands for all tokens before a page
  static constexpr Place kStart = 0;

  explicit Pages(int64_t count);

  // Returns a page with one owner, for tokens that are not known yet; nullopt when every page has an owner.
  std::optional<int32_t> take();
  // Returns the published page with these kernels::kPageTokens tokens after `before`, and adds an owner to it; nullopt
  // when there is no such page.
  std::optional<int32_t> find(Place before, std::span<const int64_t> tokens);
  // Publishes a page, so that find() returns it, and returns the place after it. When another page holds the same
  // tokens, this page stays private and the other page's place is returned.
  Place publish(int32_t page, Place before, std::span<const int64_t> tokens);
  Place place_behind(int32_t page) const { return pages_[static_cast<size_t>(page)].behind; }
  void release(int32_t page);

  int64_t count() const { return static_cast<int64_t>(pages_.size()); }
  int64_t owned() const { return owned_; }

 private:
  struct Key {
    Place before;
    std::array<int64_t, kernels::kPageTokens> tokens;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    size_t operator()(const Key& key) const;
  };
  struct Page {
    int64_t owners = 0;
    Place behind = kStart;  // the place after a published page
    std::optional<Key> key{};
    std::list<int32_t>::iterator unused{};  // iterator in unused_ of a published page without owner
  };
  static Key key_of(Place before, std::span<const int64_t> tokens);

  std::vector<Page> pages_;
  std::vector<int32_t> free_;
  std::list<int32_t> unused_;  // least recently used first
  std::unordered_map<Key, int32_t, Hash> published_;
  Place next_place_ = kStart + 1;
  int64_t owned_ = 0;
};

}  // namespace tessera
