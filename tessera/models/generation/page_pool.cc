#include "tessera/models/generation/page_pool.h"

#include <algorithm>

#include "tessera/base/error.h"

namespace tessera {

size_t PagePool::Hash::operator()(const Key& key) const {
  uint64_t hash = key.prefix * 0x9E3779B97F4A7C15;
  for (const int64_t token : key.tokens) {
    hash = (hash ^ static_cast<uint64_t>(token)) * 0xBF58476D1CE4E5B9;
    hash ^= hash >> 29;
  }
  return hash;
}

PagePool::Key PagePool::key_of(PrefixId prefix, std::span<const int64_t> tokens) {
  TESSERA_CHECK(static_cast<int64_t>(tokens.size()) == kernels::kPageTokens, ErrorKind::kInternal,
                "[models.pages] a page of {} tokens, wanted {}", tokens.size(), kernels::kPageTokens);
  Key key{prefix, {}};
  std::copy(tokens.begin(), tokens.end(), key.tokens.begin());
  return key;
}

PagePool::PagePool(int64_t count) : pages_(static_cast<size_t>(count)) {
  for (int64_t page = count; page-- > 0;) free_.push_back(static_cast<int32_t>(page));
}

// Takes an unpublished page if there is one, because reusing a published page discards keys and values that another
// sequence might share. A published page that is reused is removed from published_, so that find() no longer returns
// it.
std::optional<int32_t> PagePool::allocate() {
  int32_t page = 0;
  if (!free_.empty()) {
    page = free_.back();
    free_.pop_back();
  } else if (!lru_.empty()) {
    page = lru_.front();
    lru_.pop_front();
    published_.erase(*pages_[static_cast<size_t>(page)].key);
  } else {
    return std::nullopt;
  }
  pages_[static_cast<size_t>(page)] = {.ref_count = 1};
  ++pages_in_use_;
  return page;
}

std::optional<int32_t> PagePool::find(PrefixId prefix, std::span<const int64_t> tokens) {
  const auto found = published_.find(key_of(prefix, tokens));
  if (found == published_.end()) return std::nullopt;
  auto& page = pages_[static_cast<size_t>(found->second)];
  // A published page that had no owner gets one again, so it is removed from lru_, the list of reusable pages.
  if (page.ref_count++ == 0) {
    lru_.erase(page.lru_position);
    ++pages_in_use_;
  }
  return found->second;
}

// A PrefixId is never reused, so it always identifies the same list of tokens. The key (PrefixId, tokens of one page)
// therefore identifies all tokens from the start of a sequence, and find() compares the tokens of one page only.
PagePool::PrefixId PagePool::publish(int32_t index, PrefixId prefix, std::span<const int64_t> tokens) {
  const auto [entry, is_new] = published_.try_emplace(key_of(prefix, tokens), index);
  auto& page = pages_[static_cast<size_t>(entry->second)];
  if (is_new) {
    page.key = entry->first;
    page.prefix = next_prefix_++;
  }
  return page.prefix;
}

void PagePool::release(int32_t index) {
  auto& page = pages_[static_cast<size_t>(index)];
  TESSERA_CHECK(page.ref_count > 0, ErrorKind::kInternal, "[models.pages] page {} is released, but it has no owner",
                index);
  if (--page.ref_count > 0) return;
  --pages_in_use_;
  if (page.key) {
    page.lru_position = lru_.insert(lru_.end(), index);
  } else {
    free_.push_back(index);
  }
}

}  // namespace tessera
