#include "tessera/fsdp1/state/placed_values.h"

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

at::Tensor whole_of_ranges(const FlatPlace& place, const at::Tensor& piece) {
  if (!place.sharded) return piece;
  return gather_ranges(*place.group, piece, place.ranges, place.numel(), place.name);
}

// Returns the elements want[rank] in logical (row-major) order. `piece` is this rank's range in storage order. When
// both orders are equal, the elements are exchanged directly. Otherwise a range of one order is not a range of the
// other, and the tensor is gathered whole.
at::Tensor logical_part(const FlatPlace& place, const at::Tensor& piece, const std::vector<FlatRange>& want) {
  if (place.contiguous && place.sharded) return exchange_ranges(*place.group, piece, place.ranges, want, place.name);
  const auto& own = want[static_cast<size_t>(place.group->rank())];
  const at::Tensor whole = logical_order(place, whole_of_ranges(place, piece)).reshape({-1});
  return whole.narrow(0, own.begin, own.numel()).clone();
}

StateValue chunk_value(const FlatPlace& place, const at::Tensor& piece, bool offload_to_cpu) {
  const auto want = chunk_ranges(place.shape, place.group->size());
  at::Tensor local = logical_part(place, piece, want);
  if (offload_to_cpu) local = local.cpu();
  return chunks_of_ranks(local, place.shape, place.group);
}

StateValue dtensor_value(const FlatPlace& place, const at::Tensor& piece, const MeshPtr& mesh, bool offload_to_cpu) {
  Placements placements(static_cast<size_t>(mesh->ndim()), Replicate());
  placements.back() = Shard(0);
  TESSERA_CHECK(!place.shape.empty(), ErrorKind::kShape,
                "[fsdp1.shard] {}: found a tensor without dims, expected rows to shard. Give it shape [1].",
                place.name);
  const auto want = mesh_ranges(place.shape, *mesh, placements, *place.group);
  TESSERA_CHECK(want, ErrorKind::kShape,
                "[fsdp1.shard] {}: {} does not have all ranks of the FSDP group ({}). Set device_mesh to a mesh over "
                "these ranks.",
                place.name, mesh->to_string(), fmt::join(place.group->ranks(), ","));
  at::Tensor local = logical_part(place, piece, *want);
  local = local.view(local_box(place.shape, *mesh, placements).shape);
  if (offload_to_cpu) local = local.cpu();
  return from_local(local, mesh, placements, FromLocalOptions::contiguous(place.shape));
}

// Returns the position in the group of the rank in a placement text ("rank:3/cpu").
std::optional<size_t> holder_of(const comm::Group& group, const std::string& placement) {
  constexpr std::string_view kRank = "rank:";
  if (placement.compare(0, kRank.size(), kRank) != 0) return std::nullopt;
  int rank = -1;
  std::from_chars(placement.data() + kRank.size(), placement.data() + placement.size(), rank);
  const auto& ranks = group.ranks();
  const auto found = std::ranges::find(ranks, rank);
  return found == ranks.end() ? std::nullopt : std::optional(static_cast<size_t>(found - ranks.begin()));
}

// Returns each rank's range of a ShardedTensor from its metadata. Returns nullopt when its group is another one, when a
// rank has more than one range, or when the ranges do not cover the tensor exactly once. All ranks have the same
// metadata, so all get the same answer.
std::optional<std::vector<FlatRange>> sharded_ranges(const ShardedTensor& tensor, const FlatPlace& place) {
  if (!tensor.group || tensor.group->ranks() != place.group->ranks()) return std::nullopt;
  std::vector<FlatRange> ranges(place.ranges.size());
  for (const auto& shard : tensor.shards_metadata) {
    const auto rank = holder_of(*place.group, shard.placement);
    const auto range = range_of_box(tensor.size, shard.shard_offsets, shard.shard_sizes);
    if (!rank || !range || !ranges[*rank].empty()) return std::nullopt;
    ranges[*rank] = *range;
  }
  return covers_once(ranges, place.numel()) ? std::optional(ranges) : std::nullopt;
}

// Returns this rank's range of the place, from the ranges `have` in which the ranks hold the tensor.
at::Tensor fetch_piece(const FlatPlace& place, const at::Tensor& local, const std::vector<FlatRange>& have) {
  if (!place.sharded) return gather_ranges(*place.group, local, have, place.numel(), place.name);
  return exchange_ranges(*place.group, local, have, place.ranges, place.name);
}

at::Tensor piece_of_whole(const FlatPlace& place, const at::Tensor& whole) {
  const auto& own = place.own();
  return storage_order(place, whole.detach()).narrow(0, own.begin, own.numel()).to(place.device).clone();
}

}  // namespace

at::Tensor storage_order(const FlatPlace& place, const at::Tensor& whole) {
  if (place.contiguous) return whole.reshape({-1});
  const at::Tensor flat = at::empty({place.numel()}, whole.options());
  flat.as_strided(place.shape, place.strides).copy_(whole);
  return flat;
}

at::Tensor logical_order(const FlatPlace& place, const at::Tensor& flat) {
  if (place.contiguous) return flat.view(place.shape);
  return flat.as_strided(place.shape, place.strides, flat.storage_offset()).contiguous();
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
    // A plain Shard(0) gives each rank one run of rows, or none.
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
                  ErrorKind::kShape, "[fsdp1.load] {}: found a local shard of shape {}, its metadata say {} of {}",
                  quote(name), fmt::join(shard.tensor.defined() ? shard.tensor.sizes() : at::IntArrayRef{}, "x"),
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

void check_same_form(comm::Group& group, const SavedForm& form) {
  const auto& mesh = form.values.device_mesh;
  const auto text = fmt::format("{} {} {} {}", to_string(form.type), form.rank0_only, form.values.offload_to_cpu,
                                mesh ? mesh->to_string() : "");
  check_equal_on_ranks(group, {{"state_dict_type", text}}, "Set the same state_dict_type on all ranks.");
}

StateValue value_of_ranges(const FlatPlace& place, const at::Tensor& piece, const ValueOptions& options) {
  if (options.form == ValueForm::kSharded) {
    return options.device_mesh ? dtensor_value(place, piece, options.device_mesh, options.offload_to_cpu)
                               : chunk_value(place, piece, options.offload_to_cpu);
  }
  const bool first_only = options.form == ValueForm::kWholeOnFirstRank, first = place.group->rank() == 0;
  at::Tensor whole;
  if (!place.sharded) {
    whole = piece.clone();
  } else if (first_only) {
    std::vector<FlatRange> want(place.ranges.size());
    want[0] = {0, place.numel()};
    whole = exchange_ranges(*place.group, piece, place.ranges, want, place.name);
  } else {
    whole = whole_of_ranges(place, piece);
  }
  if (first_only && !first) return nullptr;
  whole = logical_order(place, whole);
  return options.offload_to_cpu ? whole.cpu() : whole;
}

at::Tensor part_like(const FlatPlace& place, const at::Tensor& piece, const at::Tensor& like) {
  if (!is_dtensor(like)) return logical_order(place, whole_of_ranges(place, piece));
  const auto want = mesh_ranges(place.shape, *device_mesh(like), placements(like), *place.group);
  if (want) {
    return logical_part(place, piece, *want).view(local_box(place.shape, *device_mesh(like), placements(like)).shape);
  }
  const at::Tensor whole = logical_order(place, whole_of_ranges(place, piece));
  return to_local(distribute_tensor(whole, device_mesh(like), placements(like), /*src_data_rank=*/std::nullopt));
}

// A value whose shards are ranges is exchanged from rank to rank. Any other value is gathered whole and this rank's
// range is taken from it. Every rank takes the same branch, because the branches depend on metadata only.
at::Tensor ranges_of_value(const FlatPlace& place, const StateValue& value) {
  if (value.is_sharded()) {
    const auto& tensor = *value.sharded();
    const auto have = place.contiguous ? sharded_ranges(tensor, place) : std::nullopt;
    if (!have) return piece_of_whole(place, all_gather_sharded_tensor(tensor));
    at::Tensor local = at::empty({0}, at::TensorOptions().dtype(tensor.dtype).device(place.device));
    for (const auto& shard : tensor.local_shards) {
      if (shard.tensor.numel() > 0) local = shard.tensor.detach().to(place.device).reshape({-1});
    }
    return fetch_piece(place, local, *have);
  }
  const at::Tensor& tensor = value.tensor();
  if (!is_dtensor(tensor)) return piece_of_whole(place, tensor);
  for (const auto& placement : placements(tensor)) {
    TESSERA_CHECK(!placement.is_partial(), ErrorKind::kShape,
                  "[fsdp1.load] {}: found a DTensor with placements {}, which is still to be reduced. Redistribute it.",
                  quote(place.name), to_string(placements(tensor)));
  }
  const at::Tensor detached = tensor.detach();
  auto have = place.contiguous ? mesh_ranges(place.shape, *device_mesh(tensor), placements(tensor), *place.group)
                               : std::nullopt;
  // Replicas hold equal ranges. Only the first holder sends, and the other replicas send nothing.
  if (have) have = first_holders(std::move(*have));
  if (!have || !covers_once(*have, place.numel())) return piece_of_whole(place, full_tensor(detached));
  const auto& own = (*have)[static_cast<size_t>(place.group->rank())];
  const at::Tensor local = to_local(detached).to(place.device).reshape({-1});
  return fetch_piece(place, own.empty() ? local.narrow(0, 0, 0) : local, *have);
}

}  // namespace tessera
