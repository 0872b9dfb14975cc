#include "tessera/train/nemo/module_offloading.h"

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>

#include <set>
#include <unordered_set>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/nn/linear/quantized_linear.h"
#include "tessera/parallel/fsdp/fully_shard.h"
#include "tessera/train/nemo/storage_file.h"

namespace tessera::train {
namespace {

// Calls `visit(name, tensor)` with every buffer, then every parameter and its gradient: each tensor once.
template <class Visit>
void visit_tensors_of(nn::Module& model, const Visit& visit) {
  std::unordered_set<const c10::TensorImpl*> seen;
  const auto once = [&](const std::string& name, at::Tensor& tensor) {
    if (tensor.defined() && seen.insert(tensor.unsafeGetTensorImpl()).second) visit(name, tensor);
  };
  for (const auto& [path, module] : model.named_modules()) {
    for (auto& buffer : module->own_buffers()) {
      once(path.empty() ? buffer.name : path + "." + buffer.name, *buffer.slot);
    }
  }
  for (const auto& named : model.named_parameters(true)) {
    for (at::Tensor* tensor : {&named.slot->parameter, named.slot->slot}) {
      once(named.name, *tensor);
      if (tensor->is_leaf() && tensor->grad().defined()) once(named.name + ".grad", tensor->mutable_grad());
    }
  }
}

bool is_at(const at::Tensor& tensor, c10::Device device) {
  return tensor.device().type() == device.type() && (!device.has_index() || tensor.device() == device);
}

std::vector<c10::Storage> cpu_storages_of(nn::Module& model) {
  std::vector<c10::Storage> out;
  std::set<const c10::StorageImpl*> seen;
  visit_tensors_of(model, [&](const std::string&, at::Tensor& tensor) {
    const at::Tensor part = local_tensor_of(tensor.detach());
    if (!part.is_cpu() || !part.has_storage() || part.storage().nbytes() == 0) return;
    if (seen.insert(part.storage().unsafeGetStorageImpl()).second) out.push_back(part.storage());
  });
  return out;
}

// Frees unsharded parameters that fully_shard keeps after forward. They are copies; the next forward gathers them
// again.
void free_unsharded_parameters(nn::Module& model) {
  for (const auto& [path, module] : model.named_modules()) {
    if (module->sharding() && is_fully_sharded(*module)) reshard(*module);
  }
}

}  // namespace

// All checks run in a first pass over all tensors, so that an error leaves the model as it was.
void move_to_device(nn::Module& model, c10::Device device) {
  const at::NoGradGuard no_grad;
  visit_tensors_of(model, [&](const std::string& name, at::Tensor& tensor) {
    const bool placed = is_dtensor(tensor);
    TESSERA_CHECK(!placed || device_mesh(tensor)->device_type() == device.type(), ErrorKind::kShape,
                  "[train.move_to_device] {}: is a DTensor on {}, wanted a mesh on {}. Create the mesh on this device.",
                  name, device_mesh(tensor)->to_string(), device.str());
    TESSERA_CHECK(
        placed || !(tensor.is_meta() || device.is_meta()), ErrorKind::kShape,
        "[train.move_to_device] {}: cannot move from {} to {}: the meta device holds no values. Call to_empty "
        "and initialise or load it first.",
        name, tensor.device().str(), device.str());
  });
  visit_tensors_of(model, [&](const std::string&, at::Tensor& tensor) {
    if (!is_dtensor(tensor) && !is_at(tensor, device)) tensor.set_data(tensor.detach().to(device));
  });
  // Quantized linears keep their packed weights outside of parameters and buffers, so visit_tensors_of() does not move
  // these weights; they are moved here.
  for (const auto& [name, packed] : nn::packed_weights(model)) {
    packed->device = device;
    if (packed->weight.defined()) packed->set_weight(packed->weight);
  }
  if (const auto accelerator = at::accelerator::getAccelerator(); accelerator && *accelerator != device.type()) {
    at::accelerator::emptyCache();
  }
}

ScopedModuleOffloading::ScopedModuleOffloading(nn::Module& model, bool enabled, OffloadLocations locations)
    : model_(model), is_on_device_(enabled), locations_(std::move(locations)) {
  if (!enabled) return;
  if (!locations_.device) {
    const auto accelerator = at::accelerator::getAccelerator();
    TESSERA_CHECK(accelerator.has_value(), ErrorKind::kConfig,
                  "[train.offload] device: found no accelerator on this machine. Name a device, or leave offloading "
                  "disabled.");
    locations_.device = c10::Device(*accelerator);
  }
  try {
    // An earlier ScopedModuleOffloading may have left the model's storages in a mapped file, so they are moved to
    // memory first. If locations_.device is the CPU, nothing else has to be done, and move_to_device() moves nothing.
    storages_to_memory(cpu_storages_of(model_));
    move_to_device(model_, *locations_.device);
  } catch (...) {
    try {
      move_back();
    } catch (const std::exception& error) {
      log_error("[train.offload] the model stays partly on {}: {}", locations_.device->str(), error.what());
    }
    throw;
  }
}

void ScopedModuleOffloading::move_back() {
  free_unsharded_parameters(model_);
  if (!locations_.device->is_cpu()) move_to_device(model_, c10::kCPU);
  if (!locations_.idle_folder.empty()) storages_to_file(cpu_storages_of(model_), locations_.idle_folder);
}

void ScopedModuleOffloading::close() {
  if (!is_on_device_) return;
  is_on_device_ = false;
  move_back();
}

ScopedModuleOffloading::~ScopedModuleOffloading() {
  try {
    close();
  } catch (const std::exception& error) {
    log_error("[train.offload] the model stays on {}: {}", locations_.device->str(), error.what());
  }
}

}  // namespace tessera::train
