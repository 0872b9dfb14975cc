#include "tessera/parallel/detail/group_node.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

namespace tessera::parallel {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Sink : torch::CustomClassHolder {
  GradientSink take;
  variable_list whole;  // only until forward returns them
};

struct GatheredParameters : torch::autograd::Function<GatheredParameters> {
  static variable_list forward(AutogradContext* context, const c10::intrusive_ptr<Sink>& sink, at::TensorList shards) {
    context->set_materialize_grads(false);
    context->saved_data["sink"] = c10::IValue::make_capsule(sink);
    context->saved_data["inputs"] = static_cast<int64_t>(shards.size());
    return std::move(sink->whole);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    auto sink = c10::static_intrusive_pointer_cast<Sink>(context->saved_data["sink"].toCapsule());
    sink->take(std::move(gradients));
    return variable_list(static_cast<size_t>(context->saved_data["inputs"].toInt()) + 1);
  }
};

}  // namespace

std::vector<at::Tensor> connect_gradients(const std::vector<at::Tensor>& shards, std::vector<at::Tensor> whole,
                                          GradientSink sink) {
  auto holder = c10::make_intrusive<Sink>();
  holder->take = std::move(sink);
  holder->whole = std::move(whole);
  return GatheredParameters::apply(holder, at::TensorList(shards));
}

void before_backward_of(const at::Tensor& output, std::function<void()> hook) {
  output.register_hook([hook = std::move(hook)](const at::Tensor&) { hook(); });
}

void at_end_of_backward(std::function<void()> callback) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(callback));
}

bool inside_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

}  // namespace tessera::parallel
