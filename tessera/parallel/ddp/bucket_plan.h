// Assigns gradients to buckets.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace tessera {

// The size and dtype of one gradient.
struct BucketItem {
  int64_t bytes;
  c10::ScalarType dtype;
};

// Puts `items`, in order, into buckets of one dtype each, and returns the positions of each bucket's items. A bucket is
// closed when it holds `limit` bytes or more; the first bucket of each dtype at `first_limit`. Buckets are ordered by
// their first item. This is the rule of torch's _compute_bucket_assignment_by_size.
std::vector<std::vector<size_t>> assign_buckets(const std::vector<BucketItem>& items, int64_t first_limit,
                                                int64_t limit);

}  // namespace tessera
