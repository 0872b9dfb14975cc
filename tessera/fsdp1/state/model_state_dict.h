// Makes the state dict of the weights of a model under FSDP1, in the form of its state_dict_type, and loads such a
// dict.
//
//   const auto scope = state_dict_type(*model, {.type = StateDictType::kFull, .state_dict_config = FullStateDictConfig{
//                                                  .offload_to_cpu = true, .rank0_only = true}});
//   StateDict weights = fsdp1_state_dict(*model);          // {} on ranks other than 0
//   load_fsdp1_state_dict(*model, weights);
//
// Names are those of the model before it was wrapped; a shared parameter is in the dict under each of its names.
// Tensors outside FSDP1 (other parameters, persistent buffers) are plain tensors. Parameters are exchanged one at a
// time. COLLECTIVE over the FSDP group; an error on one rank is thrown on all ranks.
#pragma once

#include "tessera/fsdp1/state/state_dict_type.h"
#include "tessera/nn/module.h"
#include "tessera/state/incompatible_keys.h"
#include "tessera/state/state_value.h"

namespace tessera {

// The returned dict has copies of the tensors, on the device of the model or, with offload_to_cpu, on the CPU. With
// LOCAL_STATE_DICT it has one "_flat_param" per unit: a ShardedTensor over the flat parameter whose local shard is this
// rank's shard without padding. Without sharding, LOCAL_STATE_DICT and SHARDED_STATE_DICT give whole tensors and a
// warning. ignore_frozen_params leaves out parameters that need no gradient. Errors: kShape for a tensor without dims
// that must be sharded; kConfig for LOCAL_STATE_DICT with a device mesh, or of a model in which only some units are
// sharded.
StateDict fsdp1_state_dict(nn::Module& model, bool ignore_frozen_params = false);

struct Fsdp1LoadOptions {
  bool strict = true;  // missing and unexpected keys are errors
  // true: the state dict may lack parameters that need no gradient, and these are not reported as missing keys.
  bool ignore_frozen_params = false;
};

// The model's state_dict_type decides the keys: with StateDictType::kLocal and sharded units one "_flat_param" per
// unit, otherwise the names of the parameters. With every type, a value may be a whole tensor, a ShardedTensor or a
// DTensor of any layout. Names may have the prefixes of PyTorch's wrappers (state_dict.h). With rank0_only, only the
// dict of rank 0 is read. Shapes and shared parameters are checked before anything is changed. Errors kShape: missing
// or unexpected keys with `strict`, other shapes, local shards that differ from their metadata, two keys for one name,
// dicts that differ between ranks, and values under two names of a shared parameter that are not bitwise equal.
IncompatibleKeys load_fsdp1_state_dict(nn::Module& model, const StateDict& state_dict,
                                       const Fsdp1LoadOptions& options = {});

}  // namespace tessera
