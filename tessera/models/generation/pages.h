// Which pages of a key-value cache (nn/attention/paged_cache.h) belong to whom.
//
//   Pages pages(1024);
//   auto page = pages.find(Pages::kStart, first_16_tokens);     // computed before by another sequence: shared
//   if (!page) page = pages.take();                             // none: every page has an owner
//   const auto place = pages.publish(*page, Pages::kStart, first_16_tokens);   // when all its tokens are computed
//   pages.find(place, next_16_tokens);
//
// A page is found by its tokens and all tokens before it, compared one by one. A published page that nobody owns is
// kept until its memory is wanted, the one unused for longest first. A value of integers alone; one thread at a time.
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
  using Place = uint64_t;  // what stands before a page: all tokens up to there
  static constexpr Place kStart = 0;

  explicit Pages(int64_t count);

  // A page for tokens that are not known yet, with one owner.
  std::optional<int32_t> take();
  // The published page of these kernels::kPageTokens tokens behind that place, with one owner more.
  std::optional<int32_t> find(Place before, std::span<const int64_t> tokens);
  // From now on others find it. The place behind it. Where another page holds the same this one stays private.
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
    Place behind = kStart;  // of a published one
    std::optional<Key> key{};
    std::list<int32_t>::iterator unused{};  // its place in unused_ where it is published and nobody owns it
  };
  static Key key_of(Place before, std::span<const int64_t> tokens);

  std::vector<Page> pages_;
  std::vector<int32_t> free_;
  std::list<int32_t> unused_;  // for longest first
  std::unordered_map<Key, int32_t, Hash> published_;
  Place next_place_ = kStart + 1;
  int64_t owned_ = 0;
};

}  // namespace tessera
