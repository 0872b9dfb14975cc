#include "tessera/parallel/layers/layer_graphs.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/kernels/autograd/activation_checkpoint_cache.h"
#include "tessera/kernels/autograd/weight_grad_store.h"
#include "tessera/mesh/device_graph.h"
#include "tessera/parallel/data_parallel/gradient_nodes.h"
#include "tessera/parallel/data_parallel/make_node.h"
#include "tessera/parallel/layers/activation_checkpoint.h"
#include "tessera/parallel/layers/forward_parameters.h"
#include "tessera/parallel/layers/layer_snapshot.h"

namespace tessera {
namespace {
using torch::autograd::variable_list;
using Tensors = std::vector<at::Tensor>;

// Number of eager backwards before a layer is captured. Libraries such as cuBLAS initialise themselves in the eager
// runs; initialisation must not happen during a capture.
constexpr int64_t kWarmUps = 2;
// The largest number of recording keys (batch shapes) for which a layer keeps a RecordingPool at the same time. Calls
// with further keys run eagerly, because the recorded graphs of each key hold memory. A key is dropped after
// kDropAfterCalls calls of the layer in succession that did not use it.
constexpr size_t kMaxRecordingKeys = 4;
constexpr int64_t kDropAfterCalls = 64;

// State that all layers of one graph_layers call share.
struct SharedGraphState {
  explicit SharedGraphState(c10::Device device)
      : device(device), transient_memory(make_graph_pool(device)), stream(device, /*high_priority=*/false) {}
  c10::Device device;
  std::shared_ptr<GraphPool> transient_memory;  // for graphs whose results are copied out right after each replay
  DeviceStream stream;
  bool has_logged_eager = false;  // the message about eager calls has been logged
};

// Copies each tensor of `from` to the tensor at the same index in `to`, with one foreach operation per dtype. Undefined
// tensors of `to` are skipped.
void copy_all(const Tensors& to, const Tensors& from) {
  std::map<c10::ScalarType, std::pair<Tensors, Tensors>> by_type;
  for (size_t i = 0; i < to.size(); ++i) {
    if (!to[i].defined()) continue;
    auto& [into, out_of] = by_type[to[i].scalar_type()];
    into.push_back(to[i]);
    out_of.push_back(from[i]);
  }
  for (const auto& [type, tensors] : by_type) at::_foreach_copy_(tensors.first, tensors.second);
}

Tensors input_tensors(const nn::ForwardCall& call) {
  Tensors out;
  for (const auto* tensor : call.tensors) out.push_back(*tensor);
  return out;
}

at::Tensor empty_as(const at::Tensor& tensor) {
  return tensor.defined() ? at::empty(tensor.sizes(), tensor.options()) : tensor;
}

// Returns a tensor over the memory of `tensor`. The result does not keep this memory alive.
at::Tensor alias_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().requires_grad(false));
}

// Returns a leaf of a new autograd graph. The leaf shares the memory of `tensor` but has its own version counter, so
// later writes through `tensor` do not invalidate the new graph.
at::Tensor leaf_alias(const at::Tensor& tensor) {
  return tensor.defined() ? alias_of(tensor).set_requires_grad(tensor.requires_grad()) : tensor;
}

// Captures `work`. A failure is a kConfig error that says to turn layer graphs off, except when memory is exhausted.
template <class Work>
void capture_as(const char* pass_name, DeviceGraph& graph, const DeviceStream& stream, const Work& work) {
  try {
    capture(graph, stream, work);
  } catch (const std::exception& error) {
    if (as_error(error).kind() == ErrorKind::kMemory) throw;
    raise(ErrorKind::kConfig,
          "[parallel.layer_graphs] the {} of a layer cannot be captured: {}. Do not graph layers "
          "(train.layer_graphs=false).",
          pass_name, error.what());
  }
}

// The version counters of the tensors; 0 for undefined and inference tensors.
std::vector<uint32_t> versions_of(const Tensors& tensors) {
  std::vector<uint32_t> out;
  for (const auto& each : tensors) out.push_back(!each.defined() || each.is_inference() ? 0 : each._version());
  return out;
}

// One forward of a layer and its backward, captured as two graphs.
//
// The forward graph stores the activations that backward needs in memory of this recording alone, so other recordings
// may be replayed between its forward and its backward. The backward graph, and the forward graph of a fully
// checkpointed layer (which stores no activations), use the shared transient_memory: their results are copied out right
// after each replay, before another graph can overwrite them.
class Recording {
 public:
  Recording(std::shared_ptr<SharedGraphState> shared, const nn::Module& module, const nn::ForwardCall& call)
      : shared_(std::move(shared)),
        memory_(keeps_inputs_only(module) ? shared_->transient_memory : make_graph_pool(shared_->device)) {
    for (const auto* tensor : call.tensors) {
      const at::Tensor place = empty_as(*tensor);
      inputs_.push_back(place);
      input_leaves_.push_back(place.defined() ? place.variable_data().set_requires_grad(tensor->requires_grad())
                                              : place);
    }
  }

  // Replays forward and returns a copy of the result. Call it with gradients disabled. The first call captures the
  // forward; later calls must pass parameters at the addresses of the first.
  at::Tensor forward(const nn::ForwardCall& call, const ForwardParameters& parameters) {
    copy_all(inputs_, input_tensors(call));
    if (!forward_) capture_forward(call, parameters);
    forward_->replay();
    at::Tensor result = empty_as(output_);
    copy_all({result}, {output_.detach()});
    return result;
  }

  bool captured() const { return forward_ != nullptr; }

  // Replays backward and returns the gradients of the inputs and parameters that require one, in this order. The
  // gradient of an unused input or parameter is undefined. `written`: indices of the parameters that were written to
  // since forward.
  variable_list backward(const at::Tensor& gradient, const std::vector<size_t>& written) {
    if (!output_gradient_.defined()) output_gradient_ = empty_as(output_);
    if (!written.empty()) check_writes(written);
    copy_all({output_gradient_}, {gradient});
    if (!backward_) capture_backward();
    backward_->replay();
    Tensors out;
    for (const auto& each : gradients_) out.push_back(empty_as(each));
    copy_all(out, gradients_);
    return out;
  }

 private:
  // Error kShape if backward needs a parameter that was written to since forward. `written` has the indices of the
  // written parameters. Autograd did not see the write, because forward used parameter_leaves_, aliases of the
  // parameters with version counters of their own. So the version counters of the written leaves are incremented here,
  // and a backward is captured into a graph that is thrown away. Autograd raises its own error if and only if it saved
  // one of the written leaves for backward. The counters are restored afterwards.
  void check_writes(const std::vector<size_t>& written) const {
    std::vector<c10::VariableVersion> counters;
    for (const size_t i : written) {
      counters.push_back(parameter_leaves_[i].unsafeGetTensorImpl()->version_counter());
      counters.back().bump();
    }
    std::optional<Error> found;
    const auto graph = shared_->transient_memory->make_graph();
    try {
      capture(*graph, shared_->stream, [&] { differentiate(); });
    } catch (const std::exception& error) {
      found = as_error(error);
    }
    for (auto& counter : counters) counter.set_version(counter.current_version() - 1);
    if (!found) return;
    if (found->kind() == ErrorKind::kMemory) throw *std::move(found);
    raise(ErrorKind::kShape,
          "[parallel.layer_graphs] a parameter of a layer was written to between its forward and its backward, which "
          "needs it: {}. Update parameters when backward has run.",
          found->what());
  }

  void capture_forward(const nn::ForwardCall& call, const ForwardParameters& parameters) {
    Tensors leaves;
    for (const auto& each : parameters.tensors) leaves.push_back(leaf_alias(each));
    at::accelerator::emptyCache();  // frees the memory of the eager runs; graphs have memory of their own
    auto graph = memory_->make_graph();
    at::Tensor output;
    capture_as("forward", *graph, shared_->stream, [&] {
      const c10::AutoGradMode on(true);
      const kernels::WeightGradStore::Scope all_at_once(nullptr);
      const LeafParametersScope scope(parameters, leaves);
      output = call.run(input_leaves_).at(0);
    });
    forward_ = std::move(graph);
    output_ = std::move(output);
    parameter_leaves_ = std::move(leaves);
  }

  void capture_backward() {
    auto graph = shared_->transient_memory->make_graph();
    Tensors gradients;
    capture_as("backward", *graph, shared_->stream, [&] { gradients = differentiate(); });
    backward_ = std::move(graph);
    // gradients_ holds tensors over the addresses that the backward graph writes, but does not keep this memory
    // allocated, so that all backward graphs can share transient_memory. This is safe, because the gradients are copied
    // out right after each replay.
    for (const auto& each : gradients) gradients_.push_back(alias_of(each));
  }

  // retain_graph keeps the autograd graph and the activations that it has saved. Their memory must stay allocated,
  // because the forward graph writes the activations and the backward graph reads them at each replay.
  Tensors differentiate() const {
    const kernels::WeightGradStore::Scope all_at_once(nullptr);
    return torch::autograd::grad({output_}, tensors_requiring_grad(input_leaves_, parameter_leaves_),
                                 {output_gradient_},
                                 /*retain_graph=*/true, /*create_graph=*/false,
                                 /*allow_unused=*/true);
  }

  std::shared_ptr<SharedGraphState> shared_;
  std::shared_ptr<GraphPool> memory_;
  Tensors inputs_, input_leaves_, parameter_leaves_;
  at::Tensor output_, output_gradient_;
  Tensors gradients_;  // tensors over the addresses that the backward graph writes
  std::unique_ptr<DeviceGraph> forward_, backward_;
};

// The Recordings of one layer for one RecordingKey (input shapes, addresses of parameters). Each forward whose backward
// has not run leases a Recording of its own. `idle` has the Recordings that are not leased.
struct RecordingPool {
  RecordingKey key;
  int64_t warm_ups = 0;
  int64_t last_call = 0;
  std::vector<std::unique_ptr<Recording>> idle;
};

// The deleter of a Lease, called when the lease of a Recording ends. A captured Recording goes back to the idle list of
// its RecordingPool; a Recording that was never captured is destroyed.
struct ReturnToIdle {
  std::shared_ptr<RecordingPool> recordings;
  void operator()(Recording* recording) const {
    std::unique_ptr<Recording> returned(recording);
    if (returned->captured()) recordings->idle.push_back(std::move(returned));
  }
};
using Lease = std::unique_ptr<Recording, ReturnToIdle>;

// The autograd node of a replayed layer. Its inputs are the layer's inputs and parameters that require gradients. The
// node leases a recording from forward until the node's backward has run, or until autograd frees the node or its saved
// variables.
struct ReplayedLayer : torch::autograd::Node {
  Lease lease;
  Tensors parameters;
  std::vector<uint32_t> versions;  // of the parameters at forward

  variable_list apply(variable_list&& gradients) override {
    TESSERA_CHECK(lease, ErrorKind::kShape,
                  "[parallel.layer_graphs] backward ran through a layer that is a graph a second time. Run forward "
                  "again.");
    TESSERA_CHECK(!c10::GradMode::is_enabled(), ErrorKind::kShape,
                  "[parallel.layer_graphs] a layer that is a graph has no second derivative. Differentiate without "
                  "create_graph, or do not graph layers.");
    TESSERA_CHECK(
        addresses(parameters) == lease.get_deleter().recordings->key.parameters, ErrorKind::kShape,
        "[parallel.layer_graphs] the parameters of a layer have other addresses in its backward than in its forward. "
        "Do not move them in between, set fixed_addresses where they are sharded or replicated, or do not graph "
        "layers.");
    variable_list found(num_outputs());
    if (gradients[0].defined()) found = lease->backward(gradients[0], written());
    lease = Lease();  // frees its recordings, too
    parameters.clear();
    return found;
  }
  void release_variables() override {
    lease = Lease();  // frees its recordings, too
    parameters.clear();
  }
  std::string name() const override { return "ReplayedLayer"; }

 private:
  std::vector<size_t> written() const {  // parameters written to since forward
    const auto now = versions_of(parameters);
    std::vector<size_t> out;
    for (size_t i = 0; i < now.size(); ++i) {
      if (now[i] != versions[i]) out.push_back(i);
    }
    return out;
  }
};

class LayerGraphs {
 public:
  explicit LayerGraphs(std::shared_ptr<SharedGraphState> shared) : shared_(std::move(shared)) {}

  std::optional<at::Tensor> run(nn::Module& module, const nn::ForwardCall& call) {
    const LayerSnapshot layer = inspect_layer(module);
    const auto& parameters = layer.parameters;
    const auto depends_on = tensors_requiring_grad(input_tensors(call), parameters.tensors);
    if (depends_on.empty()) return std::nullopt;
    // A forward inside a selective checkpoint runs eagerly, too, because the checkpoint keeps results of single
    // operations.
    const bool repeats =
        call.numbers && !layer.hooked && !layer.sharded && !kernels::ActivationCheckpointCache::current();
    const auto recordings = repeats ? recordings_of(recording_key(module, call, layer)) : nullptr;
    if (!recordings) log_eager_once();
    if (!recordings) return std::nullopt;
    if (recordings->warm_ups < kWarmUps) return warm_up(recordings, call);

    auto [pointer, node] = make_node<ReplayedLayer>();
    node->lease = lease(recordings, module, call);
    node->parameters = parameters.tensors;
    node->versions = versions_of(parameters.tensors);
    at::Tensor result;
    {
      const c10::NoGradGuard no_grad;
      result = node->lease->forward(call, parameters);
    }
    node->set_next_edges(torch::autograd::collect_next_edges(depends_on));
    torch::autograd::set_history(result, pointer);
    return result;
  }

 private:
  // Finds or makes the RecordingPool of a key. Null if there are kMaxRecordingKeys pools with other keys.
  std::shared_ptr<RecordingPool> recordings_of(RecordingKey key) {
    ++calls_;
    std::erase_if(pools_, [&](const auto& each) { return each->last_call + kDropAfterCalls < calls_; });
    auto found = std::ranges::find_if(pools_, [&](const auto& each) { return each->key == key; });
    if (found == pools_.end()) {
      if (pools_.size() == kMaxRecordingKeys) return nullptr;
      found = pools_.insert(found, std::make_shared<RecordingPool>(RecordingPool{.key = std::move(key), .idle = {}}));
    }
    (*found)->last_call = calls_;
    return *found;
  }

  // Runs forward eagerly. When the backward of this call starts, the call counts as one of the kWarmUps eager calls
  // that precede graph capture.
  static at::Tensor warm_up(const std::shared_ptr<RecordingPool>& recordings, const nn::ForwardCall& call) {
    at::Tensor result = call.run(input_tensors(call)).at(0);
    on_gradient_of(result, [recordings] { ++recordings->warm_ups; });
    return result;
  }

  // Returns a Lease of an idle Recording of the RecordingPool, or of a new Recording if none is idle. A leased
  // Recording is not in the idle list.
  Lease lease(const std::shared_ptr<RecordingPool>& recordings, const nn::Module& module, const nn::ForwardCall& call) {
    auto& idle = recordings->idle;
    if (idle.empty()) idle.push_back(std::make_unique<Recording>(shared_, module, call));
    auto recording = std::move(idle.back());
    idle.pop_back();
    return Lease(recording.release(), ReturnToIdle{recordings});
  }

  void log_eager_once() {
    if (std::exchange(shared_->has_logged_eager, true)) return;
    log_info(
        "[parallel.layer_graphs] some forwards cannot be replayed (rows of several documents in float32, hooks on "
        "modules within a layer, or more than {} batch shapes at a time). These run eagerly, kernel by kernel.",
        kMaxRecordingKeys);
  }

  std::shared_ptr<SharedGraphState> shared_;
  std::vector<std::shared_ptr<RecordingPool>> pools_;
  int64_t calls_ = 0;
};

}  // namespace

void graph_layers(const std::vector<nn::Module*>& layers, c10::Device device) {
  for (auto* layer : layers) inspect_layer(*layer);
  const auto shared = std::make_shared<SharedGraphState>(device);
  for (auto* layer : layers) {
    layer->set_forward_replay(
        [graphs = std::make_shared<LayerGraphs>(shared)](nn::Module& module, const nn::ForwardCall& call) {
          return graphs->run(module, call);
        });
  }
}

}  // namespace tessera
