#include "tessera/parallel/modules/module_trace.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>

#include "tessera/dtensor/debug/comm_debug.h"

namespace tessera {

namespace {

// Backward through a module begins when the gradient of one of its outputs is known and ends when the gradient of one
// of its inputs is known, so tensor hooks on outputs and inputs mark the begin and end of its span. If no input of a
// module requires a gradient, no hook ends its span; a callback of the autograd engine ends the span at the end of
// backward.
void watch_outputs(const nn::TensorRefs& outputs, const std::string& name) {
  for (at::Tensor* output : outputs) {
    if (output->defined() && output->requires_grad()) {
      output->register_hook([name](const at::Tensor&) {
        CommDebugMode::leave_module(name);  // another output may have opened the span
        CommDebugMode::enter_module(name);
        torch::autograd::Engine::get_default_engine().queue_callback([name] { CommDebugMode::leave_module(name); });
      });
    }
  }
}

void watch_inputs(const nn::TensorRefs& inputs, const std::string& name) {
  for (at::Tensor* input : inputs) {
    if (input->defined() && input->requires_grad() && !input->is_leaf()) {
      input->register_hook([name](const at::Tensor&) { CommDebugMode::leave_module(name); });
    }
  }
}

}  // namespace

ModuleTrace::ModuleTrace(nn::Module& root, const std::string& name) {
  for (const auto& [path, module] : root.named_modules()) {
    const std::string full = path.empty() ? name : name + "." + path;
    const std::string backward = full + " (backward)";
    names_.push_back(full);
    names_.push_back(backward);
    hooks_.emplace_back(module,
                        module->register_forward_pre_hook([full, backward](nn::Module&, nn::TensorRefs& inputs) {
                          watch_inputs(inputs, backward);
                          CommDebugMode::enter_module(full);
                        }));
    hooks_.emplace_back(module, module->register_forward_hook([full, backward](nn::Module&, nn::TensorRefs& outputs) {
      CommDebugMode::leave_module(full);
      watch_outputs(outputs, backward);
    }));
  }
}

ModuleTrace::~ModuleTrace() {
  for (const auto& [module, id] : hooks_) module->remove_hook(id);
  for (const auto& name : names_) {  // spans that an exception left open
    CommDebugMode::leave_module(name);
  }
}

}  // namespace tessera
