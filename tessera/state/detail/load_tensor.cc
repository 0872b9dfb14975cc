#include "tessera/state/detail/load_tensor.h"

#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "tessera/dtensor/redistribute/shard_indices.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/dtensor/tensor/layout.h"
#include "tessera/dtensor/tensor/local_tensor.h"

namespace tessera::detail {
namespace {

// Whether two DTensors have the same mesh and placements, so that their local tensors correspond.
bool have_same_layout(const at::Tensor& a, const at::Tensor& b) {
  return placements(a) == placements(b) && *device_mesh(a) == *device_mesh(b);
}

}  // namespace

// Takes this rank's shard out of `whole` with slice_part(), as redistribute does: `held` has the index ranges of the
// whole tensor, `needed` has this rank's index ranges under the placements of `like`. A rank outside the mesh gets an
// empty tensor.
at::Tensor local_shard_of(const at::Tensor& whole, const at::Tensor& like) {
  const DeviceMesh& mesh = *device_mesh(like);
  if (!mesh.coordinate()) return whole.new_empty(to_local(like).sizes());
  const ShardSplits splits = shard_splits_of(mesh, placements(like));
  ShardIndices held, needed;
  for (int64_t dim = 0; dim < whole.dim(); ++dim) {
    held.push_back(local_index_spans(whole.size(dim), dim, mesh, ShardSplits{}, *mesh.coordinate()));
    needed.push_back(local_index_spans(whole.size(dim), dim, mesh, splits, *mesh.coordinate()));
  }
  return slice_part(whole, held, needed);
}

std::string load_mismatch(const at::Tensor& target, const at::Tensor& value) {
  if (!value.defined()) return "is an undefined tensor";
  if (value.sizes() != target.sizes()) {
    return fmt::format("has shape [{}], wanted [{}]", fmt::join(value.sizes(), ", "), fmt::join(target.sizes(), ", "));
  }
  if (value.is_complex() && !target.is_complex()) return "is complex, wanted real numbers";
  if (!is_dtensor(target)) {
    if (!is_dtensor(value)) return "";
    return fmt::format("is a DTensor on {}, wanted a plain tensor. Gather it first (gather_state_dict)",
                       device_mesh(value)->to_string());
  }
  // A whole tensor cannot be loaded into a Partial placement: it has no unique split into addends.
  if (std::ranges::any_of(placements(target), [](const Placement& each) { return each.is_partial(); })) {
    return fmt::format("cannot be loaded into a DTensor with Partial placements {}. Redistribute that DTensor first",
                       to_string(placements(target)));
  }
  if (is_dtensor(value) && !have_same_layout(target, value)) {
    return fmt::format("has placements {} on {}, wanted {} on {}. Redistribute it, or pass it as a whole tensor",
                       to_string(placements(value)), device_mesh(value)->to_string(), to_string(placements(target)),
                       device_mesh(target)->to_string());
  }
  return "";
}

void load_tensor(const at::Tensor& target, const at::Tensor& value) {
  const c10::NoGradGuard no_grad;
  const at::Tensor local = local_tensor_of(target);
  if (is_dtensor(target) && !is_dtensor(value)) {
    local.copy_(local_shard_of(value, target));
  } else {
    local.copy_(local_tensor_of(value));
  }
}

}  // namespace tessera::detail
