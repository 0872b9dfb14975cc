// Selects the form of state dicts of a model under FSDP1: whole tensors, chunks of tensors, or each rank's flat shard.
//
//   {
//     const auto scope = state_dict_type(*model, {.type = StateDictType::kSharded});
//     StateDict weights = fsdp1_state_dict(*model);
//     StateDict states = optim_state_dict(*model, *optimizer);
//   }  // the destructor of `scope` restores the earlier settings, also after an exception
//
// Semantics of FullyShardedDataParallel.state_dict_type and set_state_dict_type. The settings are stored in the FSDP1
// units of the model. No communication, so all ranks must set equal settings. Threads that run different ranks may call
// these functions at the same time.
#pragma once

#include <variant>

#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"

namespace tessera {

enum class StateDictType {
  kFull,     // whole tensors
  kSharded,  // chunks of dim 0: ShardedTensors, or DTensors when there is a device mesh
  kLocal,    // one entry "_flat_param" per unit: this rank's flat shard without padding
};
// Returns PyTorch's name of the type, such as "FULL_STATE_DICT".
const char* to_string(StateDictType type);

struct FullStateDictConfig {
  bool offload_to_cpu = false;
  bool rank0_only = false;  // saving: the other ranks get {}; loading: only rank 0's dict is read
  bool operator==(const FullStateDictConfig&) const = default;
};
struct ShardedStateDictConfig {
  bool offload_to_cpu = false;
  bool operator==(const ShardedStateDictConfig&) const = default;
};
struct LocalStateDictConfig {
  bool offload_to_cpu = false;
  bool operator==(const LocalStateDictConfig&) const = default;
};
struct FullOptimStateDictConfig {
  bool offload_to_cpu = true;
  bool rank0_only = false;
  bool operator==(const FullOptimStateDictConfig&) const = default;
};
struct ShardedOptimStateDictConfig {
  bool offload_to_cpu = true;
  bool operator==(const ShardedOptimStateDictConfig&) const = default;
};
struct LocalOptimStateDictConfig {
  bool offload_to_cpu = false;
  bool operator==(const LocalOptimStateDictConfig&) const = default;
};
// std::monostate means the default config of the StateDictType.
using StateDictConfig = std::variant<std::monostate, FullStateDictConfig, ShardedStateDictConfig, LocalStateDictConfig>;
using OptimStateDictConfig =
    std::variant<std::monostate, FullOptimStateDictConfig, ShardedOptimStateDictConfig, LocalOptimStateDictConfig>;

struct StateDictSettings {
  StateDictType type = StateDictType::kFull;
  StateDictConfig state_dict_config = {};
  OptimStateDictConfig optim_state_dict_config = {};
  // With a mesh, sharded values are DTensors with placements [..., Replicate, Shard(0)]. The mesh consists of the ranks
  // of the FSDP group, or (HSDP) has these ranks as its last dim. PyTorch takes the mesh when the model is wrapped.
  MeshPtr device_mesh = {};
  bool operator==(const StateDictSettings&) const = default;
};

// Returns the settings with the defaults of the type filled in. Error kConfig for a config of another type.
StateDictSettings complete_settings(const StateDictSettings& settings);

// Sets the settings of all FSDP1 units of `root` and returns the earlier settings. Errors kConfig: configs that do not
// match the type, a model without units, units with different settings.
StateDictSettings set_state_dict_type(nn::Module& root, const StateDictSettings& settings);
// Returns the settings of the FSDP1 units of `root`. Error kConfig for a model without units and for units with
// different settings.
StateDictSettings get_state_dict_type(nn::Module& root);

// Sets the settings of `root` and restores the earlier ones in the destructor. The module must outlive the scope, and
// nested scopes must end in reverse order.
class StateDictTypeScope {
 public:
  StateDictTypeScope(nn::Module& root, const StateDictSettings& settings);
  ~StateDictTypeScope();
  StateDictTypeScope(const StateDictTypeScope&) = delete;
  StateDictTypeScope& operator=(const StateDictTypeScope&) = delete;

 private:
  nn::Module& root_;
  StateDictSettings previous_;
};
[[nodiscard]] inline StateDictTypeScope state_dict_type(nn::Module& root, const StateDictSettings& settings) {
  return StateDictTypeScope(root, settings);
}

}  // namespace tessera
