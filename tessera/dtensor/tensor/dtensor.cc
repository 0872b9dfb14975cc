#include "tessera/dtensor/tensor/dtensor.h"

#include <ATen/ATen.h>

#include <sstream>

#include "tessera/dtensor/tensor/dtensor_impl.h"

namespace tessera {

bool is_dtensor(const at::TensorBase& tensor) noexcept {
  return tensor.defined() && is_dtensor_impl(*tensor.unsafeGetTensorImpl());
}

const MeshPtr& device_mesh(const at::TensorBase& tensor) { return checked_impl("device_mesh", tensor).mesh(); }

const Placements& placements(const at::TensorBase& tensor) { return checked_impl("placements", tensor).placements(); }

bool is_pending(const at::TensorBase& tensor) { return checked_impl("is_pending", tensor).is_pending(); }

namespace {
const comm::ContextKey kImplicitReplication{"implicit replication"};
}

ImplicitReplication::ImplicitReplication() : in_force_(kImplicitReplication, this) {}

bool implicit_replication_enabled() noexcept { return comm::ContextValue::innermost(kImplicitReplication) != nullptr; }

std::string str(const at::Tensor& tensor) {
  const DTensorImpl& impl = checked_impl("str", tensor);
  std::ostringstream text;
  text << "DTensor(shape=" << tensor.sizes() << ", dtype=" << tensor.dtype()
       << ", placements=" << to_string(impl.placements()) << ", mesh=" << impl.mesh()->to_string()
       << (tensor.requires_grad() ? ", requires_grad" : "") << ", local on rank " << impl.mesh()->rank() << "=\n"
       << impl.local().detach() << ")";
  return text.str();
}

}  // namespace tessera
