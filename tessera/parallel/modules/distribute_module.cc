#include "tessera/parallel/modules/distribute_module.h"

#include <unordered_map>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {

void distribute_module(nn::Module& module, const MeshPtr& mesh, const DistributeModuleOptions& options) {
  TESSERA_CHECK(mesh != nullptr, ErrorKind::kShape, "[parallel.distribute_module] found no mesh.");
  TESSERA_CHECK(
      module.mark_distributed(), ErrorKind::kShape,
      "[parallel.distribute_module] distribute_module should only be called once on a module, but it has already been "
      "called on this module!");
  const auto modules = module.named_modules();
  if (options.partition_fn) {
    for (const auto& [name, each] : modules) options.partition_fn(name, *each, mesh);
  }
  // A tied tensor is replicated once, so it stays tied. The keys of `known` are addresses of the original tensors.
  // `known` keeps these tensors alive, so that no new tensor gets one of these addresses.
  std::unordered_map<const c10::TensorImpl*, std::pair<at::Tensor, at::Tensor>> known;
  const auto is_plain = [](const at::Tensor& tensor) { return tensor.defined() && !is_dtensor(tensor); };
  const auto replicated = [&](const at::Tensor& plain) {
    auto& [original, made] = known[plain.unsafeGetTensorImpl()];
    if (!made.defined()) {
      original = plain;
      made = distribute_tensor(plain.detach(), mesh, Placements(mesh->ndim(), Replicate()));
      made.set_requires_grad(plain.requires_grad());
    }
    return made;
  };
  for (const auto& [name, each] : modules) {
    for (auto& slot : each->own_parameters()) {
      if (is_plain(slot.parameter)) nn::Module::set_parameter(slot, replicated(slot.parameter));
    }
    for (auto& buffer : each->own_buffers()) {
      if (is_plain(*buffer.slot)) *buffer.slot = replicated(*buffer.slot);
    }
  }
  if (options.input_fn) {
    module.register_forward_pre_hook(
        [mesh, hook = options.input_fn](nn::Module& of, nn::TensorRefs& inputs) { hook(of, inputs, mesh); });
  }
  if (options.output_fn) {
    module.register_forward_hook(
        [mesh, hook = options.output_fn](nn::Module& of, nn::TensorRefs& outputs) { hook(of, outputs, mesh); });
  }
}

}  // namespace tessera
