// A wrapper of a model, such as FSDP1 with its flat parameters, may make the state dicts of the model itself. The
// functions of state_dict.h call the handler that is attached to a module of the model, if there is one.
#pragma once

#include <vector>

#include "tessera/nn/module.h"
#include "tessera/optim/optimizer.h"
#include "tessera/state/state_dict.h"

namespace tessera {

// A wrapper attaches an object of this class to a module (nn::Module::set_sharding). Each function does the work of the
// function of the same name in state_dict.h, for the whole model, and is COLLECTIVE over the wrapper's group.
class StateDictHandler {
 public:
  virtual ~StateDictHandler() = default;
  // Returns whether the wrapper itself manages parameters of its module. False when nested wrapped modules manage all
  // of them; the handler of such a module is not used.
  virtual bool has_parameters() const = 0;
  virtual StateDict get_model_state_dict(nn::Module& model, const StateDictOptions& options) const = 0;
  virtual IncompatibleKeys set_model_state_dict(nn::Module& model, const StateDict& values,
                                                const StateDictOptions& options) const = 0;
  virtual StateDict get_optimizer_state_dict(nn::Module& model, const std::vector<optim::Optimizer*>& optimizers,
                                             const StateDictOptions& options) const = 0;
  virtual void set_optimizer_state_dict(nn::Module& model, const std::vector<optim::Optimizer*>& optimizers,
                                        const StateDict& values, const StateDictOptions& options) const = 0;
};

// Returns the handler of the outermost module that has an attached handler with has_parameters(); null when no module
// of the model has one.
const StateDictHandler* state_dict_handler(nn::Module& model);

}  // namespace tessera
