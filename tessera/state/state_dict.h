// State dicts of a model and its optimizers that do not depend on how the model is parallel: names are those of the
// plain model, and values fit any other layout. For fully_shard (FSDP2, HSDP), tensor parallelism, replicate (DDP),
// FSDP1 and plain models.
//
//   auto [weights, states] = get_state_dict(*model, {optimizer.get()});                  // DTensors, nothing gathered
//   StateDict whole = get_model_state_dict(*model, {.full_state_dict = true, .cpu_offload = true});   // COLLECTIVE
//   set_model_state_dict(*other, whole, {.full_state_dict = true, .broadcast_from_rank0 = true});     // COLLECTIVE
//
// Semantics of torch.distributed.checkpoint.state_dict; docs/design/state.md says where they differ. Values of get_ may
// share memory with the model and the optimizer (no values are copied that need not be), so that a checkpoint can be
// loaded into them in place. A model and its optimizers belong to one rank.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/comm/group/group.h"
#include "tessera/nn/module.h"
#include "tessera/optim/optimizer.h"
#include "tessera/state/incompatible_keys.h"
#include "tessera/state/state_value.h"

namespace tessera {

struct StateDictOptions {
  // get: whole tensors instead of parts. set: values are whole, on every rank unless broadcast_from_rank0.
  bool full_state_dict = false;
  // get: values lie on the CPU; with full_state_dict only rank 0 gets any, the others {}.
  bool cpu_offload = false;
  // get: parameters that need no gradient are left out. set: they may be missing.
  bool ignore_frozen_params = false;
  bool keep_submodule_prefixes = true;  // of submodules
  // set: missing and unexpected names, and parameters without a saved optimizer state, are Errors.
  bool strict = true;
  // set: rank 0's dict counts, the others' are not looked at. Wants full_state_dict.
  bool broadcast_from_rank0 = false;
  bool flatten_optimizer_state_dict = false;  // get: the flat form (optimizer_forms.h); set: takes any form
  // From a parameter's or buffer's name in the model to that in dicts (dsd_fqn_modifiers); empty: the same. No two may
  // get one name.
  std::function<std::string(const std::string& fqn)> fqn_modifier = {};
  // get: only these modules of the model. Deprecated upstream; without their prefixes when keep_submodule_prefixes is
  // off, which takes one.
  std::vector<nn::Module*> submodules = {};
  // Its rank 0 is meant above. Default: all ranks, of the world of the first DTensor in the model; a model without any
  // needs it for broadcast_from_rank0, and without it every rank gets what else rank 0 gets.
  std::shared_ptr<comm::Group> group = {};
};

// Parameters and persistent buffers by name; what modules share is there under each of its names. COLLECTIVE over the
// meshes of the parameters when full_state_dict. Errors: kConfig for options that contradict one another; kShape for
// whole values of what is on the meta device.
StateDict get_model_state_dict(nn::Module& model, const StateDictOptions& options = {});

// States by name and groups, of all optimizers together: {"state": {...}, "param_groups": [...]}, or flat. States exist
// before the first step, too. A shared parameter has its first name. COLLECTIVE as above. Error kConfig: no optimizers,
// one that holds no parameters of the model, two that hold the same one.
StateDict get_optimizer_state_dict(nn::Module& model, const std::vector<optim::Optimizer*>& optimizers,
                                   const StateDictOptions& options = {});

struct ModelAndOptimizerState {
  StateDict model, optimizer;
};
ModelAndOptimizerState get_state_dict(nn::Module& model, const std::vector<optim::Optimizer*>& optimizers,
                                      const StateDictOptions& options = {});

// Copies values into the model. A value is whole, or lies as the parameter does, or is a ShardedTensor (COLLECTIVE over
// its group). Names may have the prefixes of PyTorch's wrappers (_orig_mod, _fsdp_wrapped_module,
// _checkpoint_wrapped_module). What modules share may be there under any of its names. Parameters and persistent
// buffers on the meta device become real ones (to_empty): make optimizers afterwards; other buffers there stay. With
// broadcast_from_rank0 COLLECTIVE over the group, one tensor at a time. Nothing is changed before everything is
// checked. Errors kShape: missing and unexpected keys when strict; other shapes; different values under the names of
// one parameter; no value for something on the meta device.
IncompatibleKeys set_model_state_dict(nn::Module& model, const StateDict& model_state_dict,
                                      const StateDictOptions& options = {});

// Copies states and hyper-parameters into the optimizers, as load_optimizer_state_dict does. Takes dicts by name, flat
// ones, and by id for a single optimizer. Saved groups and states of other parameters are ignored, so that any stage of
// a pipeline loads the whole. COLLECTIVE as above. Errors kShape, before anything is changed: a trained parameter
// without a state when strict; parameters of one group that were saved in groups with different hyper-parameters;
// several groups without parameters.
void set_optimizer_state_dict(nn::Module& model, const std::vector<optim::Optimizer*>& optimizers,
                              const StateDict& optimizer_state_dict, const StateDictOptions& options = {});

// Optimizers, then the model.
IncompatibleKeys set_state_dict(nn::Module& model, const std::vector<optim::Optimizer*>& optimizers,
                                const StateDict& model_state_dict, const StateDict& optimizer_state_dict,
                                const StateDictOptions& options = {});

// What no dict of these functions may be: without anything in it although something was asked for, or with the flat
// parameters of FSDP1. No communication. Error kShape.
void verify_model_state_dict(const StateDict& model_state_dict, const StateDictOptions& options = {});
void verify_optimizer_state_dict(const StateDict& optimizer_state_dict, const StateDictOptions& options = {});
void verify_state_dict(const StateDict& model_state_dict, const StateDict& optimizer_state_dict,
                       const StateDictOptions& options = {});

}  // namespace tessera
