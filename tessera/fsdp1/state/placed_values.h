// One tensor between the form in which FSDP1 keeps it (each rank a range) and the forms of state dicts (whole, chunks
// as ShardedTensor, DTensor). Chunks and DTensors whose parts are ranges are exchanged from rank to rank; anything else
// goes through the whole of this one tensor.
//
//   StateValue saved = value_of_ranges(place, piece, {.form = ValueForm::kSharded});
//   at::Tensor piece = ranges_of_value(place, saved);
//
// Each is COLLECTIVE over the place's group, where it is sharded.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

#include "tessera/base/log.h"
#include "tessera/dtensor/tensor/placement.h"
#include "tessera/fsdp1/state/state_dict_type.h"
#include "tessera/fsdp1/state/units.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/state/state_value.h"

namespace tessera {

enum class ValueForm { kWhole, kWholeOnFirstRank, kSharded };

struct ValueOptions {
  ValueForm form = ValueForm::kWhole;
  MeshPtr device_mesh = {};  // kSharded: DTensors over it instead of ShardedTensors
  bool offload_to_cpu = false;
};

// The form that settings ask for, and which ranks get the values.
struct SavedForm {
  StateDictType type = StateDictType::kFull;
  ValueOptions values;
  bool rank0_only = false;
};
// `config` is the settings' for weights or for optimizer states. Where no unit is sharded, values are whole, with a
// warning, which begins with `where`, for types that ask for parts.
template <class Config>
SavedForm saved_form(const StateDictSettings& settings, const Config& config, const Fsdp1Units& model,
                     const char* where) {
  SavedForm form{.type = settings.type, .values = {.device_mesh = settings.device_mesh}};
  std::visit(
      [&](const auto& held) {
        if constexpr (requires { held.offload_to_cpu; }) form.values.offload_to_cpu = held.offload_to_cpu;
        if constexpr (requires { held.rank0_only; }) form.rank0_only = held.rank0_only;
      },
      config);
  if (settings.type != StateDictType::kFull && model.any_sharded()) {
    form.values.form = ValueForm::kSharded;
    return form;
  }
  if (settings.type != StateDictType::kFull) {
    log_warning("{} {} without sharding (NO_SHARD, or a group of one rank): whole tensors", where,
                to_string(settings.type));
  }
  form.values.form = form.rank0_only ? ValueForm::kWholeOnFirstRank : ValueForm::kWhole;
  return form;
}
// Error kConfig on all ranks when they have different forms. COLLECTIVE over the group.
void check_same_form(comm::Group& group, const SavedForm& form);

// `piece`: what this rank has of the place, 1-d, of place.own().numel() elements. None on ranks that get nothing.
// Nothing is shared with `piece`. Errors kShape: a piece of another size; sharded tensors without dims; a mesh that has
// not the ranks of the group.
StateValue value_of_ranges(const FlatPlace& place, const at::Tensor& piece, const ValueOptions& options);

// This rank's piece of a value that has the place's shape: a whole tensor (the same on every rank), a ShardedTensor or
// a DTensor; 1-d, a copy, on the place's device. Error kShape, on every rank, for a Partial DTensor or boxes that do
// not cover the tensor once.
at::Tensor ranges_of_value(const FlatPlace& place, const StateValue& value);

// This rank's part of a tensor that lies as `like` does: of a DTensor its local part, of a plain tensor everything. On
// the place's device, contiguous. Errors as of value_of_ranges.
at::Tensor part_like(const FlatPlace& place, const at::Tensor& piece, const at::Tensor& like);

// The global shape and dtype of a tensor, ShardedTensor or DTensor; nullopt for anything else.
struct ValueShape {
  std::vector<int64_t> shape;
  c10::ScalarType dtype;
};
std::optional<ValueShape> value_shape(const StateValue& value);
// What this rank has of a ShardedTensor is what its metadata say, so that an exchange cannot fail on one rank only.
// Error kShape, which begins with the name. Other values are fine.
void check_local_shards(const std::string& name, const StateValue& value);
// What ranks must agree on before they exchange a value: type, shape, dtype, how it lies; of numbers the value.
std::string describe_value(const StateValue& value);

// The elements of a whole tensor in the order of the place's storage, 1-d; and back, contiguous. Views where possible.
at::Tensor storage_order(const FlatPlace& place, const at::Tensor& whole);
at::Tensor logical_order(const FlatPlace& place, const at::Tensor& flat);

// What each rank of the group has of a DTensor of this shape; nullopt where that is not one range a rank: placements
// other than Replicate and Shard(0), or ranks of the group outside the mesh.
std::optional<std::vector<FlatRange>> mesh_ranges(at::IntArrayRef shape, const DeviceMesh& mesh,
                                                  const Placements& placements, const comm::Group& group);

}  // namespace tessera
