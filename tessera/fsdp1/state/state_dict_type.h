// What state dicts of a model under FSDP1 hold: whole tensors, chunks of them, or each rank's flat shard.
//
//   {
//     const auto scope = state_dict_type(*model, {.type = StateDictType::kSharded});
//     StateDict weights = fsdp1_state_dict(*model);
//     StateDict states = optim_state_dict(*model, *optimizer);
//   }                                                       // as before, also after an exception
//
// Semantics of FullyShardedDataParallel.state_dict_type and set_state_dict_type. Settings belong to the FSDP1 units of
// a model and end with them; no communication, so give all ranks the same. Thread-safe between ranks.
#pragma once

#include <variant>

#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"

namespace tessera {

enum class StateDictType {
  kFull,     // whole tensors
  kSharded,  // chunks of dim 0: ShardedTensors, or DTensors where there is a device mesh
  kLocal,    // one entry "_flat_param" a unit: this rank's flat shard without its padding
};
// "FULL_STATE_DICT", ...
const char* to_string(StateDictType type);

struct FullStateDictConfig {
  bool offload_to_cpu = false;
  bool rank0_only = false;  // saving: others get {}; loading: only rank 0's dict is read
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
// std::monostate: the default of the type.
using StateDictConfig = std::variant<std::monostate, FullStateDictConfig, ShardedStateDictConfig, LocalStateDictConfig>;
using OptimStateDictConfig =
    std::variant<std::monostate, FullOptimStateDictConfig, ShardedOptimStateDictConfig, LocalOptimStateDictConfig>;

struct StateDictSettings {
  StateDictType type = StateDictType::kFull;
  StateDictConfig state_dict_config = {};
  OptimStateDictConfig optim_state_dict_config = {};
  // Sharded values are then DTensors over it, [..., Replicate, Shard(0)]. It holds the ranks of the FSDP group, alone
  // or (HSDP) as its last dim. Upstream takes it where the model is wrapped.
  MeshPtr device_mesh = {};
  bool operator==(const StateDictSettings&) const = default;
};

// The settings with the defaults of the type filled in. Error kConfig for configs of another type.
StateDictSettings complete_settings(const StateDictSettings& settings);

// Applies to all FSDP1 units of `root`; returns what was before. Errors kConfig: configs that do not fit the type, no
// units, units that differed.
StateDictSettings set_state_dict_type(nn::Module& root, const StateDictSettings& settings);
// Error kConfig: no units, or units that differ.
StateDictSettings get_state_dict_type(nn::Module& root);

// While it lives, `root` has these settings. It must outlive neither the module nor another scope around it.
class StateDictTypeScope {
 public:
  StateDictTypeScope(nn::Module& root, const StateDictSettings& settings);
  ~StateDictTypeScope();
  StateDictTypeScope(const StateDictTypeScope&) = delete;
  StateDictTypeScope& operator=(const StateDictTypeScope&) = delete;

 private:
  nn::Module& root_;
  StateDictSettings before_;
};
[[nodiscard]] inline StateDictTypeScope state_dict_type(nn::Module& root, const StateDictSettings& settings) {
  return StateDictTypeScope(root, settings);
}

}  // namespace tessera
