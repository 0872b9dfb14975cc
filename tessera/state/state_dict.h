// State dicts of a model and its optimizers that do not depend on how the model is parallelised. The names are those of
// the plain model, and the values can be loaded into a model with any other layout. The functions work for fully_shard
// (FSDP2, HSDP), tensor parallelism, replicate (DDP), FSDP1 and plain models.
//
//   auto [weights, states] = get_state_dict(*model, {optimizer.get()});                  // DTensors, nothing gathered
//   StateDict whole = get_model_state_dict(*model, {.full_state_dict = true, .cpu_offload = true});   // COLLECTIVE
//   set_model_state_dict(*other, whole, {.full_state_dict = true, .broadcast_from_rank0 = true});     // COLLECTIVE
//
// Semantics of torch.distributed.checkpoint.state_dict; docs/design/state.md lists the differences. Values that the
// get_ functions return may share memory with the model and the optimizer, because tensors are copied only where
// necessary. A checkpoint can therefore be loaded into these values in place. A model and its optimizers are used by
// one rank only.
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

// "get:" says what an option does in the get_..._state_dict functions, "set:" what it does in the set_ functions.
struct StateDictOptions {
  // get: returns whole tensors instead of shards. set: the values are whole tensors, on every rank, or on rank 0 only
  // with broadcast_from_rank0.
  bool full_state_dict = false;
  // get: moves the values to the CPU. With full_state_dict only rank 0 gets values, and the other ranks get {}.
  bool cpu_offload = false;
  // get: leaves out parameters that need no gradient. set: the dict may lack these parameters.
  bool ignore_frozen_params = false;
  bool keep_submodule_prefixes = true;  // get: names keep the prefix of their module in `submodules`
  // set: a missing or unexpected name in the dict, or a parameter without a saved optimizer state, is an error.
  bool strict = true;
  // set: uses the dict of rank 0 and ignores the dicts of the other ranks. Requires full_state_dict.
  bool broadcast_from_rank0 = false;
  bool flatten_optimizer_state_dict = false;  // get: returns the flat form (optimizer_forms.h); set accepts every form
  // Maps the name of a parameter or buffer in the model to its name in dicts (upstream's dsd_fqn_modifiers). Empty: the
  // names are equal. Two tensors must not get one name.
  std::function<std::string(const std::string& fqn)> fqn_modifier = {};
  // get: returns only the tensors of these modules of the model. Deprecated in PyTorch. With keep_submodule_prefixes =
  // false there must be exactly one module.
  std::vector<nn::Module*> submodules = {};
  // The group that two options use. With cpu_offload and full_state_dict only rank 0 of the group gets the values. With
  // broadcast_from_rank0 rank 0 of the group has the values. Default: all ranks in the world of the model's first
  // DTensor. For a model without DTensors there is no default: broadcast_from_rank0 then needs a group, and with
  // cpu_offload every rank gets the values if no group is given.
  std::shared_ptr<comm::Group> group = {};
};

// Returns the parameters and persistent buffers by name. A shared tensor is in the dict under each of its names.
// COLLECTIVE over the meshes of the parameters with full_state_dict. Errors: kConfig for options that contradict each
// other; kShape for full_state_dict of a tensor on the meta device.
StateDict get_model_state_dict(nn::Module& model, const StateDictOptions& options = {});

// Returns the states of all optimizers by name, with their groups: {"state": {...}, "param_groups": [...]}, or the flat
// form. States exist also before the first step. A shared parameter has its first name. COLLECTIVE in the same cases as
// get_model_state_dict. Error kConfig: no optimizers, an optimizer with parameters that are not in the model, two
// optimizers with the same parameter.
StateDict get_optimizer_state_dict(nn::Module& model, const std::vector<optim::Optimizer*>& optimizers,
                                   const StateDictOptions& options = {});

struct ModelAndOptimizerState {
  StateDict model, optimizer;
};
ModelAndOptimizerState get_state_dict(nn::Module& model, const std::vector<optim::Optimizer*>& optimizers,
                                      const StateDictOptions& options = {});

// Copies values into the model.
// - A value is a whole tensor, a DTensor with the layout of the parameter, or a ShardedTensor (COLLECTIVE over
//   the ShardedTensor's group).
// - Names may have the prefixes of PyTorch's wrappers (_orig_mod, _fsdp_wrapped_module,
//   _checkpoint_wrapped_module). A shared tensor may be in the dict under any of its names.
// - Parameters and persistent buffers on the meta device are allocated (to_empty), so optimizers must be made
//   afterwards. Other buffers stay on the meta device.
// - With broadcast_from_rank0 the function is COLLECTIVE over StateDictOptions::group (or its default), and sends
//   one tensor at a time.
// All checks come before the first change. Errors kShape: missing and unexpected keys with `strict`; a value of
// another shape; different values under two names of one tensor; no value for a tensor on the meta device.
IncompatibleKeys set_model_state_dict(nn::Module& model, const StateDict& model_state_dict,
                                      const StateDictOptions& options = {});

// Copies states and hyper-parameters into the optimizers, as load_optimizer_state_dict does. The dict is by name or
// flat, or by id for a single optimizer. Saved groups and states of other parameters are ignored, so each pipeline
// stage can load the dict of the whole model. COLLECTIVE in the same cases as set_model_state_dict. Errors kShape,
// before anything is changed: with `strict`, a parameter that requires a gradient has no saved state; parameters of one
// group were saved in groups with different hyper-parameters; there are several groups without parameters.
void set_optimizer_state_dict(nn::Module& model, const std::vector<optim::Optimizer*>& optimizers,
                              const StateDict& optimizer_state_dict, const StateDictOptions& options = {});

// Loads the optimizers first, then the model.
IncompatibleKeys set_state_dict(nn::Module& model, const std::vector<optim::Optimizer*>& optimizers,
                                const StateDict& model_state_dict, const StateDict& optimizer_state_dict,
                                const StateDictOptions& options = {});

// Throw Error kShape for a dict that the functions above cannot have made: an empty dict although the options ask for
// values, or a model's dict with the flat parameters of FSDP1 (_flat_param). No communication.
void verify_model_state_dict(const StateDict& model_state_dict, const StateDictOptions& options = {});
void verify_optimizer_state_dict(const StateDict& optimizer_state_dict, const StateDictOptions& options = {});
void verify_state_dict(const StateDict& model_state_dict, const StateDict& optimizer_state_dict,
                       const StateDictOptions& options = {});

}  // namespace tessera
