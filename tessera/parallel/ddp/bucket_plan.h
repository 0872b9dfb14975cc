// Which gradients travel together.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace tessera {

struct BucketItem {
  int64_t bytes;
  c10::ScalarType dtype;
};

// Positions of `items`, in order, put into buckets of one dtype each: a bucket is closed when it holds `limit` bytes or
// more, the first of each dtype at `first_limit`. Buckets in the order of their first item. The rule of torch's
// _compute_bucket_assignment_by_size.
std::vector<std::vector<size_t>> assign_buckets(const std::vector<BucketItem>& items, int64_t first_limit,
                                                int64_t limit);

}  // namespace tessera
