#include "tessera/parallel/modules/distribute_module.h"

#include <unordered_map>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {

namespace {

// Tied tensors stay tied: the same one is replicated once.
class Replicator {
 public:
  explicit Replicator(const MeshPtr& mesh) : mesh_(mesh) {}

  void replicate(nn::Module& module) {
    for (auto& slot : module.own_parameters()) {
      if (slot.parameter.defined() && !is_dtensor(slot.parameter)) {
        nn::Module::set_parameter(slot, replicated(slot.parameter));
      }
    }
    for (auto& buffer : module.own_buffers()) {
      if (buffer.slot->defined() && !is_dtensor(*buffer.slot)) *buffer.slot = replicated(*buffer.slot);
    }
  }

 private:
  at::Tensor replicated(const at::Tensor& plain) {
    at::Tensor& made = made_[plain.unsafeGetTensorImpl()];
    if (!made.defined()) {
      made = distribute_tensor(plain.detach(), mesh_, Placements(mesh_->ndim(), Replicate()));
      made.set_requires_grad(plain.requires_grad());
      originals_.push_back(plain);  // keeps the address from being used again
    }
    return made;
  }

  const MeshPtr& mesh_;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> made_;
  std::vector<at::Tensor> originals_;
};

}  // namespace

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
  Replicator replicator(mesh);
  for (const auto& [name, each] : modules) replicator.replicate(*each);
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
