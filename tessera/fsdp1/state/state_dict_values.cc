#include "tessera/fsdp1/state/state_dict_values.h"

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/dtensor/tensor/layout.h"
#include "tessera/state/broadcast_state.h"
#include "tessera/state/sharded_tensor.h"
#include "tessera/state/state_message.h"

namespace tessera {
namespace {

at::Tensor whole_of_ranges(const FlatTensorLayout& layout, const at::Tensor& piece) {
  if (!layout.sharded) return piece;
  return all_gather_ranges(*layout.group, piece, layout.ranges, layout.numel(), layout.name);
}

// Returns this rank's range of the tensor in logical (row-major) order. `want` has the range of each rank in this
// order. `piece` has this rank's range in storage order, or the whole tensor if the layout is not sharded. When both
// orders are equal, the ranks of a sharded layout exchange the elements directly. Otherwise a range of one order is not
// a range of the other, so every rank gathers the whole tensor and takes its range.
at::Tensor to_logical_range(const FlatTensorLayout& layout, const at::Tensor& piece,
                            const std::vector<FlatRange>& want) {
  if (layout.contiguous && layout.sharded) {
    return all_to_all_ranges(*layout.group, piece, layout.ranges, want, layout.name);
  }
  const auto& own = want[static_cast<size_t>(layout.group->rank())];
  const at::Tensor whole = to_logical_order(layout, whole_of_ranges(layout, piece)).reshape({-1});
  return whole.narrow(0, own.begin, own.numel()).clone();
}

StateValue chunk_value(const FlatTensorLayout& layout, const at::Tensor& piece, bool offload_to_cpu) {
  const auto want = chunk_ranges(layout.shape, layout.group->size());
  at::Tensor local = to_logical_range(layout, piece, want);
  if (offload_to_cpu) local = local.cpu();
  return chunks_of_ranks(local, layout.shape, layout.group);
}

StateValue dtensor_value(const FlatTensorLayout& layout, const at::Tensor& piece, const MeshPtr& mesh,
                         bool offload_to_cpu) {
  Placements placements(static_cast<size_t>(mesh->ndim()), Replicate());
  placements.back() = Shard(0);
  TESSERA_CHECK(!layout.shape.empty(), ErrorKind::kShape,
                "[fsdp1.shard] {}: found a tensor without dims, expected rows to shard. Give it shape [1].",
                layout.name);
  const auto want = mesh_ranges(layout.shape, *mesh, placements, *layout.group);
  TESSERA_CHECK(want, ErrorKind::kShape,
                "[fsdp1.shard] {}: {} does not have all ranks of the FSDP group ({}). Set device_mesh to a mesh over "
                "these ranks.",
                layout.name, mesh->to_string(), fmt::join(layout.group->ranks(), ","));
  at::Tensor local = to_logical_range(layout, piece, *want);
  local = local.view(local_box(layout.shape, *mesh, placements).shape);
  if (offload_to_cpu) local = local.cpu();
  return from_local(local, mesh, placements, FromLocalOptions::contiguous(layout.shape));
}

// Returns the group rank of the global rank that a placement text such as "rank:3/cpu" names.
std::optional<size_t> holder_of(const comm::Group& group, const std::string& placement) {
  constexpr std::string_view kRank = "rank:";
  if (placement.compare(0, kRank.size(), kRank) != 0) return std::nullopt;
  int rank = -1;
  std::from_chars(placement.data() + kRank.size(), placement.data() + placement.size(), rank);
  const auto& ranks = group.ranks();
  const auto found = std::ranges::find(ranks, rank);
  return found == ranks.end() ? std::nullopt : std::optional(static_cast<size_t>(found - ranks.begin()));
}

// Returns each rank's range of a ShardedTensor from its metadata. Returns nullopt when the tensor's group does not have
// the ranks of the layout's group, when a shard is not one range or a rank has more than one, or when the ranges do not
// cover the tensor exactly once. All ranks have the same metadata, so all ranks get the same result.
std::optional<std::vector<FlatRange>> sharded_ranges(const ShardedTensor& tensor, const FlatTensorLayout& layout) {
  if (!tensor.group || tensor.group->ranks() != layout.group->ranks()) return std::nullopt;
  std::vector<FlatRange> ranges(layout.ranges.size());
  for (const auto& shard : tensor.shards_metadata) {
    const auto rank = holder_of(*layout.group, shard.placement);
    const auto range = range_of_box(tensor.size, shard.shard_offsets, shard.shard_sizes);
    if (!rank || !range || !ranges[*rank].empty()) return std::nullopt;
    ranges[*rank] = *range;
  }
  return covers_once(ranges, layout.numel()) ? std::optional(ranges) : std::nullopt;
}

// Redistributes a flattened tensor. Returns the elements that this rank has under `layout`; without sharding, all
// elements. `local` has the elements that this rank has before the call, and `have` has the range of each rank before
// the call.
at::Tensor redistribute_range(const FlatTensorLayout& layout, const at::Tensor& local,
                              const std::vector<FlatRange>& have) {
  if (!layout.sharded) return all_gather_ranges(*layout.group, local, have, layout.numel(), layout.name);
  return all_to_all_ranges(*layout.group, local, have, layout.ranges, layout.name);
}

at::Tensor piece_of_whole(const FlatTensorLayout& layout, const at::Tensor& whole) {
  const auto& own = layout.own();
  return to_storage_order(layout, whole.detach()).narrow(0, own.begin, own.numel()).to(layout.device).clone();
}

}  // namespace

at::Tensor to_storage_order(const FlatTensorLayout& layout, const at::Tensor& whole) {
  if (layout.contiguous) return whole.reshape({-1});
  const at::Tensor flat = at::empty({layout.numel()}, whole.options());
  flat.as_strided(layout.shape, layout.strides).copy_(whole);
  return flat;
}

at::Tensor to_logical_order(const FlatTensorLayout& layout, const at::Tensor& flat) {
  if (layout.contiguous) return flat.view(layout.shape);
  return flat.as_strided(layout.shape, layout.strides, flat.storage_offset()).contiguous();
}

std::optional<std::vector<FlatRange>> mesh_ranges(at::IntArrayRef shape, const DeviceMesh& mesh,
                                                  const Placements& placements, const comm::Group& group) {
  if (shape.empty()) return std::nullopt;
  for (const auto& placement : placements) {
    if (!placement.is_replicate() && !placement.is_shard(0)) return std::nullopt;
  }
  const int64_t row = numel_of(shape.slice(1));
  const ShardSplits splits = shard_splits_of(mesh, placements);
  std::vector<FlatRange> ranges;
  for (const int rank : group.ranks()) {
    const auto found = std::find(mesh.ranks().begin(), mesh.ranks().end(), rank);
    if (found == mesh.ranks().end()) return std::nullopt;
    // Under Shard(0) a rank has one contiguous range of rows, or none.
    const IndexSpans rows =
        local_index_spans(shape[0], 0, mesh, splits, coordinate_at(mesh, found - mesh.ranks().begin()));
    const bool has_any = !rows.empty() && row > 0;
    ranges.push_back(has_any ? FlatRange{rows[0].start * row, (rows[0].start + rows[0].size) * row} : FlatRange{});
  }
  return ranges;
}

std::optional<ValueShape> value_shape(const StateValue& value) {
  if (value.is_tensor() && value.tensor().defined()) {
    return ValueShape{value.tensor().sizes().vec(), value.tensor().scalar_type()};
  }
  if (value.is_sharded() && value.sharded()) return ValueShape{value.sharded()->size, value.sharded()->dtype};
  return std::nullopt;
}

void check_local_shards(const std::string& name, const StateValue& value) {
  if (!value.is_sharded()) return;
  for (const auto& shard : value.sharded()->local_shards) {
    TESSERA_CHECK(shard.tensor.defined() && shard.tensor.sizes() == at::IntArrayRef(shard.metadata.shard_sizes) &&
                      shard.tensor.scalar_type() == value.sharded()->dtype,
                  ErrorKind::kShape,
                  "[fsdp1.load] {}: found a local shard of shape {} and {}, its metadata say {} of {}", quote(name),
                  fmt::join(shard.tensor.defined() ? shard.tensor.sizes() : at::IntArrayRef{}, "x"),
                  shard.tensor.defined() ? c10::toString(shard.tensor.scalar_type()) : "no dtype",
                  c10::toString(value.sharded()->dtype), fmt::join(shard.metadata.shard_sizes, "x"));
  }
}

std::string describe_value(const StateValue& value) {
  const auto shape = value_shape(value);
  if (!shape) {
    const bool nested = value.is_list() || value.is_tuple() || value.is_dict() || value.is_bytes();
    return fmt::format("{} {}", type_name(value),
                       nested ? escape(encode_state(value, TensorsInMessage::kShapes)) : scalar_text(value));
  }
  std::string text =
      fmt::format("{} of {} [{}]", type_name(value), c10::toString(shape->dtype), fmt::join(shape->shape, ","));
  if (value.is_sharded()) {
    for (const auto& shard : value.sharded()->shards_metadata) {
      text += fmt::format(" {}+{}@{}", fmt::join(shard.shard_offsets, ","), fmt::join(shard.shard_sizes, ","),
                          shard.placement);
    }
  } else if (is_dtensor(value.tensor())) {
    text += fmt::format(" {} on {}", to_string(placements(value.tensor())), device_mesh(value.tensor())->to_string());
  } else if (shape->shape.empty()) {
    text += " " + scalar_text(value);
  }
  return text;
}

void check_same_form(comm::Group& group, const StateDictForm& form) {
  const auto& mesh = form.values.device_mesh;
  const auto text = fmt::format("{} {} {} {}", to_string(form.type), form.rank0_only, form.values.offload_to_cpu,
                                mesh ? mesh->to_string() : "");
  check_equal_on_ranks(group, {{"state_dict_type", text}}, "Set the same state_dict_type on all ranks.");
}

StateValue to_state_dict_value(const FlatTensorLayout& layout, const at::Tensor& piece, const ValueOptions& options) {
  if (options.form == ValueForm::kSharded) {
    return options.device_mesh ? dtensor_value(layout, piece, options.device_mesh, options.offload_to_cpu)
                               : chunk_value(layout, piece, options.offload_to_cpu);
  }
  const bool first_only = options.form == ValueForm::kWholeOnFirstRank, first = layout.group->rank() == 0;
  at::Tensor whole;
  if (!layout.sharded) {
    whole = piece.clone();
  } else if (first_only) {
    std::vector<FlatRange> want(layout.ranges.size());
    want[0] = {0, layout.numel()};
    whole = all_to_all_ranges(*layout.group, piece, layout.ranges, want, layout.name);
  } else {
    whole = whole_of_ranges(layout, piece);
  }
  if (first_only && !first) return nullptr;
  whole = to_logical_order(layout, whole);
  return options.offload_to_cpu ? whole.cpu() : whole;
}

at::Tensor to_layout_of(const FlatTensorLayout& layout, const at::Tensor& piece, const at::Tensor& like) {
  if (!is_dtensor(like)) return to_logical_order(layout, whole_of_ranges(layout, piece));
  const auto want = mesh_ranges(layout.shape, *device_mesh(like), placements(like), *layout.group);
  if (want) {
    return to_logical_range(layout, piece, *want)
        .view(local_box(layout.shape, *device_mesh(like), placements(like)).shape);
  }
  const at::Tensor whole = to_logical_order(layout, whole_of_ranges(layout, piece));
  return to_local(distribute_tensor(whole, device_mesh(like), placements(like), /*src_data_rank=*/std::nullopt));
}

// If the value is a ShardedTensor or a DTensor and the shard of each rank is one range of the flattened tensor, the
// ranks send each other only the elements that the receiving rank needs. Otherwise the value is gathered whole (a plain
// tensor is whole already), and this rank's range is taken from the whole tensor. Every rank takes the same branch,
// because the branches depend on metadata only.
at::Tensor to_local_range(const FlatTensorLayout& layout, const StateValue& value) {
  if (value.is_sharded()) {
    const auto& tensor = *value.sharded();
    const auto have = layout.contiguous ? sharded_ranges(tensor, layout) : std::nullopt;
    if (!have) return piece_of_whole(layout, all_gather_sharded_tensor(tensor));
    at::Tensor local = at::empty({0}, at::TensorOptions().dtype(tensor.dtype).device(layout.device));
    for (const auto& shard : tensor.local_shards) {
      if (shard.tensor.numel() > 0) local = shard.tensor.detach().to(layout.device).reshape({-1});
    }
    return redistribute_range(layout, local, *have);
  }
  const at::Tensor& tensor = value.tensor();
  if (!is_dtensor(tensor)) return piece_of_whole(layout, tensor);
  for (const auto& placement : placements(tensor)) {
    TESSERA_CHECK(!placement.is_partial(), ErrorKind::kShape,
                  "[fsdp1.load] {}: found a DTensor with placements {}, which is still to be reduced. Redistribute it.",
                  quote(layout.name), to_string(placements(tensor)));
  }
  const at::Tensor detached = tensor.detach();
  auto have = layout.contiguous ? mesh_ranges(layout.shape, *device_mesh(tensor), placements(tensor), *layout.group)
                                : std::nullopt;
  // Replicas hold equal ranges. Only the first holder sends, and the other replicas send nothing.
  if (have) have = keep_first_holders(std::move(*have));
  if (!have || !covers_once(*have, layout.numel())) return piece_of_whole(layout, full_tensor(detached));
  const auto& own = (*have)[static_cast<size_t>(layout.group->rank())];
  const at::Tensor local = to_local(detached).to(layout.device).reshape({-1});
  return redistribute_range(layout, own.empty() ? local.narrow(0, 0, 0) : local, *have);
}

}  // namespace tessera
