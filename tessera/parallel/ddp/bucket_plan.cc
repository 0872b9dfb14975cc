#include "tessera/parallel/ddp/bucket_plan.h"

#include <algorithm>
#include <map>

namespace tessera {

std::vector<std::vector<size_t>> assign_buckets(const std::vector<BucketItem>& items, int64_t first_limit,
                                                int64_t limit) {
  struct OpenBucket {
    std::vector<size_t> members;
    int64_t bytes = 0;
    bool first = true;
  };
  // The bucket of each dtype that is being filled. Buckets become full in another order than they were begun, so they
  // are sorted by their first item at the end.
  std::map<c10::ScalarType, OpenBucket> open;
  std::vector<std::vector<size_t>> buckets;
  const auto close = [&](OpenBucket& bucket) {
    if (!bucket.members.empty()) buckets.push_back(std::move(bucket.members));
    bucket = {.members = {}, .bytes = 0, .first = false};
  };
  for (size_t i = 0; i < items.size(); ++i) {
    auto& bucket = open[items[i].dtype];
    bucket.members.push_back(i);
    bucket.bytes += items[i].bytes;
    if (bucket.bytes >= (bucket.first ? first_limit : limit)) close(bucket);
  }
  for (auto& [dtype, bucket] : open) close(bucket);
  std::ranges::sort(buckets);
  return buckets;
}

}  // namespace tessera
