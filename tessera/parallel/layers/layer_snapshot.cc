#include "tessera/parallel/layers/layer_snapshot.h"

#include <ATen/Context.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/nn/experts/moe.h"
#include "tessera/nn/linear/float8.h"
#include "tessera/nn/linear/lora.h"
#include "tessera/nn/linear/quantized_linear.h"

namespace tessera {
namespace {

void refuse_if(bool found, const char* feature, const char* advice) {
  TESSERA_CHECK(!found, ErrorKind::kConfig,
                "[parallel.layer_graphs] a layer with {}: its kernels depend on more than shapes, so it cannot be a "
                "graph. {}, or do not graph layers (train.layer_graphs=false).",
                feature, advice);
}

void refuse_tensor_parallel_if(bool found) { refuse_if(found, "tensor-parallel parameters", "Set parallel.tp to 1"); }

void append_shape(const at::Tensor& tensor, std::vector<int64_t>& out) {
  out.push_back(tensor.defined() ? tensor.dim() : -1);
  if (!tensor.defined()) return;
  out.insert(out.end(), tensor.sizes().begin(), tensor.sizes().end());
  out.push_back(static_cast<int64_t>(tensor.scalar_type()));
  out.push_back(tensor.requires_grad());
}

}  // namespace

LayerSnapshot inspect_layer(nn::Module& layer) {
  LayerSnapshot out;
  layer.for_each_module([&](nn::Module& module) {
    refuse_if(dynamic_cast<nn::MoE*>(&module) != nullptr, "experts", "Train a dense model");
    refuse_if(dynamic_cast<nn::Float8Linear*>(&module) != nullptr, "float8 products", "Set precision.fp8 to false");
    const auto* const adapted = dynamic_cast<const nn::LoraLinear*>(&module);
    refuse_if(adapted != nullptr && adapted->settings().dropout, "adapters that drop", "Set lora.dropout to 0");
    if (const auto* const packed = nn::packed_weight_of(module)) {
      refuse_tensor_parallel_if(packed->mesh != nullptr);
      out.packed.push_back(packed->serial);
    }
    out.parameters.add_own(module);
    for (const auto& buffer : module.own_buffers()) out.buffers.push_back(*buffer.slot);
    if (&module == &layer) return;
    out.hooked |= module.has_registered_hooks() || module.forward_replay();
    out.sharded |= module.sharding() != nullptr;
  });
  const auto& parameters = out.parameters.tensors;
  // If FSDP shards modules inside the layer, their parameters are DTensors here, because their hooks gather them later.
  // This does not mean tensor parallelism.
  refuse_tensor_parallel_if(!out.sharded && std::ranges::any_of(parameters, is_dtensor));
  return out;
}

RecordingKey recording_key(const nn::Module& module, const nn::ForwardCall& call, const LayerSnapshot& layer) {
  RecordingKey key{.shapes = {module.training(), at::globalContext().deterministicAlgorithms()},
                   .packed = layer.packed,
                   .parameters = addresses(layer.parameters.tensors),
                   .buffers = addresses(layer.buffers)};
  for (const auto* tensor : call.tensors) append_shape(*tensor, key.shapes);
  for (const auto* tensors : {&layer.parameters.tensors, &layer.buffers}) {
    for (const auto& tensor : *tensors) {
      append_shape(tensor, key.shapes);
      if (tensor.defined()) key.shapes.insert(key.shapes.end(), tensor.strides().begin(), tensor.strides().end());
    }
  }
  key.shapes.insert(key.shapes.end(), call.numbers->begin(), call.numbers->end());
  return key;
}

std::vector<const void*> addresses(const std::vector<at::Tensor>& tensors) {
  std::vector<const void*> out;
  for (const auto& tensor : tensors) out.push_back(tensor.defined() ? tensor.const_data_ptr() : nullptr);
  return out;
}

}  // namespace tessera
