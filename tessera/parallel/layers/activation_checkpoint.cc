#include "tessera/parallel/layers/activation_checkpoint.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/kernels/autograd/activation_checkpoint_cache.h"
#include "tessera/kernels/autograd/weight_grad_store.h"
#include "tessera/nn/linear/lora.h"
#include "tessera/parallel/data_parallel/make_node.h"
#include "tessera/parallel/layers/forward_parameters.h"

namespace tessera {
namespace {

using torch::autograd::variable_list;

// The value of LoraDropout::first_row at the forward. It is the index of the forward's first row among all rows of the
// run, and the random mask of adapter dropout depends on it. Other forwards may change it before this forward is
// recomputed.
struct DropoutRows {
  std::shared_ptr<nn::LoraDropout> dropout;  // null: no dropout
  int64_t first_row = 0;
};

DropoutRows dropout_rows(nn::Module& module) {
  for (const auto& [path, child] : module.named_modules()) {
    const auto* adapted = dynamic_cast<const nn::LoraLinear*>(child);
    if (!adapted || !adapted->settings().dropout) continue;
    return {adapted->settings().dropout, adapted->settings().dropout->first_row};
  }
  return {};
}

// The autograd node of a checkpointed module. It returns the gradients of the module's inputs and then of its
// parameters, for those that require gradients. In backward it runs forward again on leaves of a new graph and
// differentiates that graph. The gradients that it returns flow on through the outer graph. So hooks of the outer graph
// (FSDP, DDP) see one gradient per parameter.
struct RecomputeNode : torch::autograd::Node {
  nn::ForwardFunction rerun;
  std::vector<at::Tensor> inputs;
  ForwardParameters parameters;
  std::vector<size_t> differentiable_outputs;
  std::shared_ptr<kernels::ActivationCheckpointCache> kept;
  DropoutRows rows;

  variable_list apply(variable_list&& gradients) override {
    TESSERA_CHECK(rerun, ErrorKind::kShape,
                  "[parallel.checkpoint] backward ran through a checkpointed module a second time. Run forward again.");
    // The recomputation removes each kept result from the cache when it uses the result. With retain_graph it works on
    // a copy of the cache, because another backward may recompute again.
    const bool again = kept && torch::autograd::get_current_graph_task_keep_graph();
    const auto taken = again ? std::make_shared<kernels::ActivationCheckpointCache>(*kept) : kept;
    // Disables an outer WeightGradStore, which would compute weight gradients at a later flush. The recomputed forward
    // reads its parameters as leaves of a graph that exists only in this call, so their gradients must be computed in
    // this call, too.
    const kernels::WeightGradStore::Scope all_at_once(nullptr);
    const auto inner_inputs = as_leaves(inputs), inner_parameters = as_leaves(parameters.tensors);
    variable_list outputs, output_gradients;
    {
      const c10::AutoGradMode on(true);
      const LeafParametersScope scope(parameters, inner_parameters);
      const auto exchange_rows = [&] {
        if (rows.dropout) std::swap(rows.dropout->first_row, rows.first_row);
      };
      exchange_rows();
      const auto exchange_back = c10::make_scope_exit(exchange_rows);
      kernels::ActivationCheckpointCache::Scope replay(taken, kernels::ActivationCheckpointCache::Mode::kReplay);
      const auto results = rerun(inner_inputs);
      for (size_t i = 0; i < gradients.size(); ++i) {
        if (!gradients[i].defined()) continue;
        outputs.push_back(results.at(differentiable_outputs[i]));
        output_gradients.push_back(gradients[i]);
      }
    }
    const auto inner_leaves = tensors_requiring_grad(inner_inputs, inner_parameters);
    variable_list found(inner_leaves.size());
    if (!outputs.empty()) {
      found =
          torch::autograd::grad(outputs, inner_leaves, output_gradients, /*retain_graph=*/false, /*create_graph=*/false,
                                /*allow_unused=*/true);
    }
    return found;
  }
  void release_variables() override {
    rerun = {};
    inputs.clear();
    parameters.tensors.clear();
    parameters.members.clear();
    kept.reset();
    rows = {};
  }
  std::string name() const override { return "RecomputeNode"; }
};

void wrap_forward(nn::Module& module, const nn::TensorRefs& inputs, nn::TensorRefs& outputs, nn::ForwardFunction rerun,
                  std::shared_ptr<kernels::ActivationCheckpointCache> kept) {
  auto [pointer, node] = make_node<RecomputeNode>();
  node->parameters = forward_parameters(module);
  for (const auto* input : inputs) node->inputs.push_back(*input);
  const auto depends_on = tensors_requiring_grad(node->inputs, node->parameters.tensors);
  if (depends_on.empty()) return;
  node->rerun = std::move(rerun);
  node->kept = std::move(kept);
  node->rows = dropout_rows(module);
  std::vector<at::Tensor> results;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i]->defined() || !outputs[i]->is_floating_point()) continue;
    node->differentiable_outputs.push_back(i);
    // A module may return one of its inputs unchanged. set_history() below must not change the graph of that input, so
    // each output is detached first.
    *outputs[i] = outputs[i]->detach();
    results.push_back(*outputs[i]);
  }
  node->set_next_edges(torch::autograd::collect_next_edges(depends_on));
  torch::autograd::set_history(results, pointer);
}

// The forward wrapper of a checkpointed module. With `selective` it keeps results of operations during the first
// forward. After the forward it makes the module's outputs the outputs of a RecomputeNode.
struct CheckpointWrapper {
  bool selective;
  nn::WrapOutputs operator()(nn::Module& of) const {
    const auto kept = selective ? std::make_shared<kernels::ActivationCheckpointCache>() : nullptr;
    const auto record = std::make_shared<kernels::ActivationCheckpointCache::Scope>(
        kept, kernels::ActivationCheckpointCache::Mode::kRecord);
    return [&of, kept, record](const nn::TensorRefs& inputs, nn::TensorRefs& outputs, nn::ForwardFunction rerun) {
      record->end();
      wrap_forward(of, inputs, outputs, std::move(rerun), kept);
    };
  }
};

}  // namespace

void checkpoint_activations(nn::Module& module, bool selective) {
  TESSERA_CHECK(!module.forward_wrapper(), ErrorKind::kConfig,
                "[parallel.checkpoint] this module is checkpointed already. Do it once.");
  module.set_forward_wrapper(CheckpointWrapper{selective});
}

bool keeps_inputs_only(const nn::Module& module) {
  const auto* wrapper = module.forward_wrapper().target<CheckpointWrapper>();
  return wrapper != nullptr && !wrapper->selective;
}

void checkpoint_layers(const std::vector<nn::Module*>& layers, ActivationCheckpointing mode) {
  if (mode == ActivationCheckpointing::kNone) return;
  for (size_t i = 0; i < layers.size(); ++i) {
    if (mode != ActivationCheckpointing::kMlp) {
      checkpoint_activations(*layers[i], mode == ActivationCheckpointing::kSelective);
      continue;
    }
    const auto& children = layers[i]->named_children();
    const auto mlp = std::ranges::find_if(children, [](const auto& child) { return child.first == "mlp"; });
    TESSERA_CHECK(mlp != children.end(), ErrorKind::kConfig,
                  "[parallel.checkpoint] layer {} has no child named mlp. Use full checkpointing.", i);
    checkpoint_activations(*mlp->second);
  }
}

ActivationCheckpointing parse_activation_checkpointing(const std::string& text) {
  if (text == "none" || text == "false") return ActivationCheckpointing::kNone;
  if (text == "mlp" || text == "true") return ActivationCheckpointing::kMlp;
  if (text == "selective") return ActivationCheckpointing::kSelective;
  if (text == "full") return ActivationCheckpointing::kFull;
  raise(ErrorKind::kConfig,
        "[parallel.checkpoint] activation checkpointing: found '{}', wanted none, mlp (or true), selective or full.",
        text);
}

}  // namespace tessera
