// Converts one tensor between FSDP1's form (each rank has a range of the flattened tensor) and the forms of state dicts
// (a whole tensor, a ShardedTensor, a DTensor). When all shards of a ShardedTensor or DTensor are ranges, the ranks
// send each other only the needed elements. Otherwise the one tensor is all-gathered.
//
//   StateValue saved = to_state_dict_value(layout, piece, {.form = ValueForm::kSharded});
//   at::Tensor piece = to_local_range(layout, saved);
//
// Each function is COLLECTIVE over the layout's group when the layout is sharded.
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
  MeshPtr device_mesh = {};  // kSharded: make DTensors over this mesh instead of ShardedTensors
  bool offload_to_cpu = false;
};

// The form of the values in a state dict, and the ranks that get them.
struct StateDictForm {
  StateDictType type = StateDictType::kFull;
  ValueOptions values;
  bool rank0_only = false;
};
// Returns the StateDictForm for `settings`. `config` is the part of the settings for weights or for optimizer states.
// When no unit of the model is sharded, all values are whole tensors; if settings.type is not kFull, a warning that
// begins with `where` is then logged.
template <class Config>
StateDictForm state_dict_form(const StateDictSettings& settings, const Config& config, const Fsdp1Units& model,
                              const char* where) {
  StateDictForm form{.type = settings.type, .values = {.device_mesh = settings.device_mesh}};
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
// Error kConfig on all ranks when `form` differs between ranks in type, rank0_only, offload_to_cpu or device mesh.
// COLLECTIVE over the group.
void check_same_form(comm::Group& group, const StateDictForm& form);

// Returns the value of a tensor in the form of `options`, or None on ranks that get no value. `piece` is this rank's
// range, 1-d, of layout.own().numel() elements. The result does not share memory with `piece`. Errors kShape: a piece
// of another size; a sharded tensor without dims; a mesh without the ranks of the group.
StateValue to_state_dict_value(const FlatTensorLayout& layout, const at::Tensor& piece, const ValueOptions& options);

// Returns the elements of `value` in this rank's range layout.own(), as a 1-d copy on layout.device. `value` has the
// shape layout.shape and is a whole tensor (the same on every rank), a ShardedTensor or a DTensor. Error kShape, on
// every rank, for a Partial DTensor, and for shards that do not cover the tensor exactly once.
at::Tensor to_local_range(const FlatTensorLayout& layout, const StateValue& value);

// Returns this rank's local part of the tensor in the layout of `like`: the local shard when `like` is a DTensor, the
// whole when it is a plain tensor. The result is contiguous and on the layout's device. Errors as to_state_dict_value.
at::Tensor to_layout_of(const FlatTensorLayout& layout, const at::Tensor& piece, const at::Tensor& like);

// Returns the global shape and dtype of a tensor, ShardedTensor or DTensor; nullopt for any other value.
struct ValueShape {
  std::vector<int64_t> shape;
  c10::ScalarType dtype;
};
std::optional<ValueShape> value_shape(const StateValue& value);
// Checks that this rank's shards of a ShardedTensor have the shape in their metadata, so that an exchange cannot fail
// on one rank only. Error kShape, which contains `name`. Other values pass.
void check_local_shards(const std::string& name, const StateValue& value);
// Describes a value by the properties that all ranks must agree on before they exchange it: type, shape, dtype and
// layout, and for numbers the value.
std::string describe_value(const StateValue& value);

// These functions convert between a whole tensor and the 1-d tensor of its elements in storage order, which is the
// order of layout.strides. to_logical_order returns a contiguous tensor of layout.shape. The results are views where
// possible.
at::Tensor to_storage_order(const FlatTensorLayout& layout, const at::Tensor& whole);
at::Tensor to_logical_order(const FlatTensorLayout& layout, const at::Tensor& flat);

// Returns, for each rank of `group`, the range of elements that the rank has of a DTensor with this shape, mesh and
// placements. Returns nullopt when `shape` has no dims, when a placement is neither Replicate nor Shard(0), because a
// shard may then not be one range, and when a rank of `group` is outside the mesh.
std::optional<std::vector<FlatRange>> mesh_ranges(at::IntArrayRef shape, const DeviceMesh& mesh,
                                                  const Placements& placements, const comm::Group& group);

}  // namespace tessera
