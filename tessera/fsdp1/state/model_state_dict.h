// The weights of a model under FSDP1 as a state dict, in the form that its state_dict_type says, and back.
//
//   const auto scope = state_dict_type(*model, {.type = StateDictType::kFull, .state_dict_config = FullStateDictConfig{
//                                                  .offload_to_cpu = true, .rank0_only = true}});
//   StateDict weights = fsdp1_state_dict(*model);          // {} but on rank 0
//   load_fsdp1_state_dict(*model, weights);
//
// Names are those of the model before it was wrapped; a shared parameter is there under each of its names. What FSDP1
// does not manage (other parameters, persistent buffers) is there as plain tensors. One parameter is exchanged at a
// time. COLLECTIVE over the FSDP group; an error on one rank is thrown on all.
#pragma once

#include "tessera/fsdp1/state/state_dict_type.h"
#include "tessera/nn/module.h"
#include "tessera/state/incompatible_keys.h"
#include "tessera/state/state_value.h"

namespace tessera {

// Copies, on the device of the model unless offload_to_cpu. LOCAL_STATE_DICT: one "_flat_param" a unit, a ShardedTensor
// over the flat tensor that holds this rank's shard without its padding. Without sharding sharded and local types give
// whole tensors, with a warning. Errors kShape: tensors without dims that are to be sharded; kConfig: local beside a
// device mesh, local of a model of which only some units are sharded. ignore_frozen_params: parameters that need no
// gradient are left out.
StateDict fsdp1_state_dict(nn::Module& model, bool ignore_frozen_params = false);

struct Fsdp1LoadOptions {
  bool strict = true;                 // missing and unexpected keys are Errors
  bool ignore_frozen_params = false;  // parameters that need no gradient may be missing, and are not named as such
};

// Values may be whole, ShardedTensors or DTensors of any layout, whatever the type; only local ones must be of the
// local type. Names may have the prefixes of PyTorch's wrappers (state_dict.h). With rank0_only the dict of rank 0
// counts. Nothing is changed before shapes and shared parameters are checked. Errors kShape: missing or unexpected keys
// when strict, other shapes, local shards that are not what their metadata say, two keys for one name, dicts that
// differ between ranks, values of other bits for the names of one shared parameter.
IncompatibleKeys load_fsdp1_state_dict(nn::Module& model, const StateDict& state_dict,
                                       const Fsdp1LoadOptions& options = {});

}  // namespace tessera
