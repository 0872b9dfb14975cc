#include "tessera/dtensor/random/random_fill.h"

namespace tessera {

// A dim without elements has no runs.
Region::Region(c10::IntArrayRef global_sizes) : global(global_sizes.begin(), global_sizes.end()), sizes(global) {
  for (const int64_t size : global) runs.push_back(size > 0 ? Runs{{0, size}} : Runs{});
}

Region::Region(c10::IntArrayRef global_sizes, const DeviceMesh& mesh, const Placements& placements)
    : global(global_sizes.begin(), global_sizes.end()) {
  const Cuts cuts = cuts_of(mesh, placements);
  for (size_t dim = 0; dim < global.size(); ++dim) {
    runs.push_back(runs_of(global[dim], static_cast<int64_t>(dim), mesh, cuts, *mesh.coordinate()));
    sizes.push_back(length(runs.back()));
  }
}

Region Region::with_last_dim(int64_t size) const {
  Region longer = *this;
  longer.global.push_back(size);
  longer.sizes.push_back(size);
  longer.runs.push_back({{0, size}});
  return longer;
}

int64_t Region::numel() const { return c10::multiply_integers(sizes); }

int digits_of(c10::ScalarType type) {
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
