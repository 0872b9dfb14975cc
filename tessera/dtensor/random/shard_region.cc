#include "tessera/dtensor/random/random_fill.h"

namespace tessera {

// A dim of size 0 has an empty list of spans.
ShardRegion::ShardRegion(c10::IntArrayRef global_sizes)
    : global(global_sizes.begin(), global_sizes.end()), sizes(global) {
  for (const int64_t size : global) index_spans.push_back(size > 0 ? IndexSpans{{0, size}} : IndexSpans{});
}

ShardRegion::ShardRegion(c10::IntArrayRef global_sizes, const DeviceMesh& mesh, const Placements& placements)
    : global(global_sizes.begin(), global_sizes.end()) {
  const ShardSplits splits = shard_splits_of(mesh, placements);
  for (size_t dim = 0; dim < global.size(); ++dim) {
    index_spans.push_back(local_index_spans(global[dim], static_cast<int64_t>(dim), mesh, splits, *mesh.coordinate()));
    sizes.push_back(length(index_spans.back()));
  }
}

ShardRegion ShardRegion::with_last_dim(int64_t size) const {
  ShardRegion longer = *this;
  longer.global.push_back(size);
  longer.sizes.push_back(size);
  longer.index_spans.push_back({{0, size}});
  return longer;
}

int64_t ShardRegion::numel() const { return c10::multiply_integers(sizes); }

int fraction_bits(c10::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return 53;
    case at::kHalf:
      return 11;
    case at::kBFloat16:
      return 8;
    default:
      return 24;
  }
}

}  // namespace tessera
