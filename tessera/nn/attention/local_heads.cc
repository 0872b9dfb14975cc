#include "tessera/nn/attention/local_heads.h"

#include <algorithm>

#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera::nn {

bool has_local_heads(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  if (!is_dtensor(q) || !is_dtensor(k) || !is_dtensor(v)) return false;
  const auto q_placements = placements(q);
  return placements(k) == q_placements && placements(v) == q_placements &&
         std::ranges::all_of(q_placements, [](const Placement& each) {
           return each == Replicate() || each == Shard(0) || each == Shard(1);
         });
}

at::Tensor run_on_local_heads(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
    const std::function<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&)>& attend) {
  const auto found = attend(to_local(q), to_local(k), to_local(v)).transpose(1, 2);
  auto q_placements = placements(q);
  std::replace(q_placements.begin(), q_placements.end(), Placement(Shard(1)), Placement(Shard(2)));
  return from_local(found, device_mesh(q), q_placements,
                    FromLocalOptions::contiguous({q.size(0), q.size(2), q.size(1), q.size(3)}))
      .transpose(1, 2);
}

}  // namespace tessera::nn
