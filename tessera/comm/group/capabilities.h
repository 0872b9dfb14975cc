// What a back-end does beyond what c10d's interface says.
//
//   if (capabilities_of(group.backend()).reduces) backend.allreduce(tensors, options);   // as it is
//
// No communication. Thread-safe.
#pragma once

namespace c10d {
class Backend;
}

namespace tessera::comm {

// Gloo can none of it, NCCL scatters sums.
struct Capabilities {
  // Reductions as Tessera promises them: averages too, half precision added up in float32 and rounded once, and
  // reduce_scatter in rank order.
  bool reduces = false;
  // Reduce-scatter of sums, minima, maxima and products, though half precision is rounded after each.
  bool scatters_sums = false;
};

// A back-end that can more than Gloo.
class HasCapabilities {
 public:
  virtual ~HasCapabilities() = default;
  virtual Capabilities capabilities() const = 0;
};

Capabilities capabilities_of(const c10d::Backend& backend);

}  // namespace tessera::comm
