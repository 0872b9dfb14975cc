// Abilities of a back-end that c10d's interface does not describe.
//
//   if (capabilities_of(group.backend()).reduces) backend.allreduce(tensors, options);   // needs no post-processing
//
// No communication. Thread-safe.
#pragma once

namespace c10d {
class Backend;
}

namespace tessera::comm {

// Gloo has neither `reduces` nor `scatters_sums`. NCCL and HierarchicalBackend have `scatters_sums`; the shared-memory
// and fake back-ends have `reduces`.
struct Capabilities {
  // Reductions have Tessera's semantics: averages are supported, half precision is summed in float32 and rounded once,
  // and reduce_scatter adds in rank order.
  bool reduces = false;
  // Reduce-scatter of sums, minima, maxima and products is supported, but half precision is rounded after each
  // addition.
  bool scatters_sums = false;
};

// Interface of a back-end that has more abilities than Gloo.
class HasCapabilities {
 public:
  virtual ~HasCapabilities() = default;
  virtual Capabilities capabilities() const = 0;
};

Capabilities capabilities_of(const c10d::Backend& backend);

}  // namespace tessera::comm
