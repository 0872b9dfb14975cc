#include "tessera/dtensor/tensor/dtensor_impl.h"

#include "tessera/base/error.h"

namespace tessera {

// Packs a placement into one 64-bit word, so that equal words mean equal placements. The dim gets 16 bits.
uint64_t pack_placement(const Placement& p) {
  return static_cast<uint64_t>(p.kind) | static_cast<uint64_t>(p.reduce_op) << 8 |
         static_cast<uint64_t>(static_cast<uint16_t>(p.dim)) << 16 |
         static_cast<uint64_t>(static_cast<uint32_t>(p.split_factor)) << 32;
}

SharedPlacements::SharedPlacements(Placements p) : values(std::move(p)) {
  for (const auto& placement : values) words.push_back(pack_placement(placement));
}

PlacementsPtr make_shared_placements(const Placements& placements) {
  return c10::make_intrusive<SharedPlacements>(placements);
}

namespace {
c10::DispatchKeySet keys_for(const at::Tensor& local) {
  // Autocast is enabled for each device type, so the DTensor has the autocast key of the local tensor's device. If the
  // local tensor has the Conjugate or Negative key (a pending conjugation or negation), the DTensor has the key, too,
  // so that the dispatcher handles it before it calls the DTensor kernel.
  constexpr c10::DispatchKeySet kLazy({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  return c10::DispatchKeySet({kDTensorKey, c10::DispatchKey::AutogradPrivateUse3, c10::DispatchKey::ADInplaceOrView}) |
         (local.key_set() & kLazy) | c10::getAutocastRelatedKeySetFromBackend(local.key_set().highestBackendKey());
}
}  // namespace

DTensorImpl::DTensorImpl(at::Tensor local, MeshPtr mesh, PlacementsPtr placements, c10::IntArrayRef sizes,
                         c10::IntArrayRef strides)
    : c10::TensorImpl(keys_for(local), local.dtype(), local.device()),
      mesh_(std::move(mesh)),
      placements_(std::move(placements)),
      local_(std::move(local)) {
  set_storage_access_should_throw();  // a DTensor has no storage: is_alias_of and others must raise
  if (strides.empty()) {
    set_sizes_contiguous(sizes);
  } else {
    set_sizes_and_strides(sizes, strides);
  }
}

template <class Version>
c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::copy(Version&& version, bool allow_tensor_metadata_change) const {
  auto impl = c10::make_intrusive<DTensorImpl>(local_, mesh_, placements_, sizes(), strides());
  copy_tensor_metadata(this, impl.get(), std::forward<Version>(version), allow_tensor_metadata_change);
  impl->refresh_numel();
  impl->source_ = source_;
  return impl;
}

// Gets the local tensor from `source_` (a LazyLocalTensor). If LazyLocalTensor::part() throws, source_ is kept, so each
// later use of the local tensor throws again. A source that waits for a collective is dropped after the wait. The
// source of a gathered view is kept, because at each use it must check whether the viewed tensor was written.
void DTensorImpl::wait_for_local() const {
  const auto source = source_;  // source_ is unchanged if part() throws
  local_ = source->part();
  if (!source->is_gathered_view()) source_.reset();
}

c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::shallow_copy_and_detach(const c10::VariableVersion& version_counter,
                                                                         bool allow_tensor_metadata_change) const {
  return copy(version_counter, allow_tensor_metadata_change);
}

c10::intrusive_ptr<c10::TensorImpl> DTensorImpl::shallow_copy_and_detach(c10::VariableVersion&& version_counter,
                                                                         bool allow_tensor_metadata_change) const {
  return copy(std::move(version_counter), allow_tensor_metadata_change);
}

void DTensorImpl::shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& impl) {
  TESSERA_CHECK(is_dtensor_impl(*impl), ErrorKind::kShape,
                "[dtensor.set_data] found a plain tensor as the new value of a DTensor, wanted a DTensor. "
                "Wrap it with from_local or distribute_tensor.");
  const auto& other = static_cast<const DTensorImpl&>(*impl);
  copy_tensor_metadata(&other, this, version_counter(), allow_tensor_metadata_change());
  local_ = other.local_;
  source_ = other.source_;
  mesh_ = other.mesh_;
  placements_ = other.placements_;
  refresh_numel();
}

void DTensorImpl::release_resources() {
  source_.reset();
  local_.reset();
  c10::TensorImpl::release_resources();
}

DTensorImpl& checked_impl(const char* verb, const at::TensorBase& tensor) {
  TESSERA_CHECK(tensor.defined() && is_dtensor_impl(*tensor.unsafeGetTensorImpl()), ErrorKind::kShape,
                "[dtensor.{}] found {}, wanted a DTensor. Make one with distribute_tensor or from_local.", verb,
                tensor.defined() ? "a plain tensor" : "an undefined tensor");
  return *impl_of(tensor);
}

at::Tensor with_strides(at::Tensor tensor, c10::IntArrayRef strides) {
  if (has_same_layout(tensor.sizes(), tensor.strides(), strides)) return tensor;
  return at::empty_strided(tensor.sizes(), strides, tensor.options()).copy_(tensor);
}

at::Tensor make_dtensor(at::Tensor local, MeshPtr mesh, PlacementsPtr placements, c10::IntArrayRef sizes,
                        c10::IntArrayRef strides) {
  ensure_registered();
  if (strides.empty() && !local.is_contiguous()) local = local.contiguous();
  return at::detail::make_tensor<DTensorImpl>(std::move(local), std::move(mesh), std::move(placements), sizes, strides);
}

}  // namespace tessera
