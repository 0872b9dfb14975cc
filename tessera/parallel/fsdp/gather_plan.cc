#include "tessera/parallel/fsdp/gather_plan.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

namespace tessera {
namespace {

// All ranks must choose the same method and the same order of parameters, because they determine the layout of gathered
// buffers and packed gradients. So the choice may depend only on values that are equal on all ranks.
UnshardMethod choose_method(std::vector<ShardedParam>& params, int64_t ranks, c10::Device device, bool shards_on_host) {
  const auto casts = [](const ShardedParam& param) { return param.gather_dtype != param.dtype; };
  if (ranks == 1 && !shards_on_host && std::ranges::none_of(params, casts)) return UnshardMethod::kAlias;
  if (ranks == 1 || params.size() == 1) return UnshardMethod::kInPlace;
  const auto largest = std::ranges::max_element(
      params, [](const auto& a, const auto& b) { return a.numel_of_all_ranks() < b.numel_of_all_ranks(); });
  // Global sizes are compared, because the local sizes of tensor-parallel parameters may differ between ranks.
  int64_t all = 0;
  for (const auto& param : params) all += param.numel_of_all_ranks();
  if (!device.is_cpu() || all == 0 || 4 * largest->numel_of_all_ranks() < 3 * all) return UnshardMethod::kUnpack;
  std::rotate(params.begin(), largest, largest + 1);
  return UnshardMethod::kCompact;
}

}  // namespace

GatherPlan plan_gather(std::vector<ShardedParam>& params, const DeviceMesh& mesh, const MixedPrecisionPolicy& policy,
                       bool shards_on_host) {
  for (auto& param : params) {
    const bool floating = c10::isFloatingType(param.dtype);
    param.gather_dtype = floating ? policy.param_dtype.value_or(param.dtype) : param.dtype;
  }
  const int64_t ranks = mesh.size(mesh.ndim() - 1);
  GatherPlan plan{.method = choose_method(params, ranks, mesh.device(), shards_on_host),
                  .layout = FlatLayout(ranks),
                  .unsharded_offsets = {}};
  for (const auto& param : params) {
    plan.layout.append(param.rows(), param.row_numel(), static_cast<int64_t>(c10::elementSize(param.gather_dtype)));
  }
  const int64_t gathered_bytes = ranks * plan.layout.part_bytes;
  if (plan.method == UnshardMethod::kAlias || plan.method == UnshardMethod::kInPlace) {
    for (const auto& entry : plan.layout.entries) plan.unsharded_offsets.push_back(entry.offset);
    plan.unsharded_bytes = gathered_bytes;
    return plan;
  }
  FlatLayout whole(1);
  const bool padded = !mesh.device().is_cpu();  // one kernel copies all parameters with their padding
  for (const auto& entry : plan.layout.entries) {
    whole.append(padded ? ranks * entry.chunk_rows : entry.rows, entry.row_numel, entry.itemsize);
  }
  for (const auto& entry : whole.entries) plan.unsharded_offsets.push_back(entry.offset);
  plan.unsharded_bytes =
      plan.method == UnshardMethod::kCompact ? std::max(whole.part_bytes, gathered_bytes) : whole.part_bytes;
  return plan;
}

void copy_to_unsharded(const GatherPlan& plan, const at::TensorBase& gathered, const UnshardedStorage& whole,
                       BufferPool& pool) {
  if (plan.method == UnshardMethod::kUnpack) {
    unpack_parts(plan.layout, gathered, whole.tensor(0, {plan.unsharded_bytes}, c10::kByte), plan.unsharded_offsets);
  } else if (plan.method == UnshardMethod::kCompact) {
    // `gathered` is a view of `whole`, so the unsharded parameters overwrite gathered data. All parameters but the
    // first are therefore copied to a temporary buffer, then the chunks of the first parameter are moved together, and
    // then the other parameters are copied behind it.
    const int64_t first_end = plan.unsharded_offsets[1];
    std::vector<int64_t> offsets = plan.unsharded_offsets;
    for (auto& offset : offsets) offset -= first_end;
    const at::Tensor others = pool.empty(plan.unsharded_bytes - first_end, c10::kByte, gathered.device());
    unpack_parts(plan.layout, gathered, others, offsets, 1);
    compact_first(plan.layout, gathered);
    whole.tensor(first_end, {plan.unsharded_bytes - first_end}, c10::kByte).copy_(others);
  }
}

}  // namespace tessera
