// The TensorImpl of a DTensor: global sizes and strides, and the local tensor of this rank.
//
// Its dispatch keys are PrivateUse3 and the autograd keys; its device is that of the local tensor. Operations reach the
// kernel of dispatcher.cc through PrivateUse3, below autograd, so autograd records global shapes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include "tessera/dtensor/tensor/layout.h"
#include "tessera/dtensor/tensor/placement.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera {

inline constexpr c10::DispatchKey kDTensorKey = c10::DispatchKey::PrivateUse3;

// Immutable placements, shared by DTensors and cached plans.
struct SharedPlacements final : c10::intrusive_ptr_target {
  explicit SharedPlacements(Placements p);
  Placements values;
  c10::SmallVector<uint64_t, 4> words;  // the placements as numbers, for cache keys
};
using PlacementsPtr = c10::intrusive_ptr<SharedPlacements>;
PlacementsPtr make_shared_placements(const Placements& placements);
uint64_t pack_placement(const Placement& placement);

// Provides the local tensor of a DTensor at each use. The local tensor is the result of a collective, which may still
// be running, or a view of a gathered copy, which is gathered again if the viewed tensor was written since the last
// use. Copies of a DTensor share this object.
class LazyLocalTensor {
 public:
  virtual ~LazyLocalTensor() = default;
  // Returns the local tensor. If the local tensor is the result of a collective, the call waits for the collective. If
  // is_gathered_view() is true and the viewed tensor was written since the last call, the call gathers the viewed
  // tensor again and repeats the view operation, which is COLLECTIVE over the mesh.
  virtual const at::Tensor& part() = 0;
  // false: the local tensor is the result of one collective. true: the DTensor is a view whose viewed tensor had to be
  // gathered, and the local tensor is a view of the gathered copy. If the viewed tensor was written since, part()
  // gathers again. The dispatch refuses writes to the view, because they would not reach the viewed tensor.
  virtual bool is_gathered_view() const = 0;
};

class DTensorImpl final : public c10::TensorImpl {
 public:
  // Sizes and strides are global and the same on all ranks; empty strides mean contiguous. The dims of the local tensor
  // must have the memory order that the global strides describe, so that a view operation that is possible for the
  // global strides is possible on the local tensor.
  DTensorImpl(at::Tensor local, MeshPtr mesh, PlacementsPtr placements, c10::IntArrayRef sizes,
              c10::IntArrayRef strides);

  // Returns the local tensor. If `source_` is set, gets the local tensor from LazyLocalTensor::part(), which may wait
  // for a collective.
  const at::Tensor& local() const {
    if (source_) [[unlikely]] {
      wait_for_local();
    }
    return local_;
  }
  bool is_pending() const { return source_ != nullptr && !source_->is_gathered_view(); }
  bool is_gathered_view() const { return source_ != nullptr && source_->is_gathered_view(); }
  // While source_ is set, only the dtype and device of `local_` are used; local() gets the tensor from the source.
  void set_source(std::shared_ptr<LazyLocalTensor> source) { source_ = std::move(source); }
  const std::shared_ptr<LazyLocalTensor>& source() const { return source_; }
  const MeshPtr& mesh() const { return mesh_; }
  const PlacementsPtr& shared_placements() const { return placements_; }
  const Placements& placements() const { return placements_->values; }

  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version_counter,
                                                              bool allow_tensor_metadata_change) const override;
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version_counter,
                                                              bool allow_tensor_metadata_change) const override;
  void shallow_copy_from(const c10::intrusive_ptr<c10::TensorImpl>& impl) override;
  void release_resources() override;

 protected:
  const char* tensorimpl_type_name() const override { return "DTensorImpl"; }

 private:
  template <class Version>
  c10::intrusive_ptr<c10::TensorImpl> copy(Version&& version, bool allow_tensor_metadata_change) const;

  void wait_for_local() const;

  MeshPtr mesh_;  // declared first, so destroyed last: it owns the groups that a source may be using
  PlacementsPtr placements_;
  mutable at::Tensor local_;
  mutable std::shared_ptr<LazyLocalTensor> source_;
};

inline bool is_dtensor_impl(const c10::TensorImpl& impl) {
  return impl.key_set().has_backend(c10::BackendComponent::PrivateUse3Bit);
}
inline DTensorImpl* impl_of(const at::TensorBase& tensor) {
  return static_cast<DTensorImpl*>(tensor.unsafeGetTensorImpl());
}
// Returns the impl of a DTensor. Error kShape for a plain or undefined tensor. `verb` is the caller's name for the
// message.
DTensorImpl& checked_impl(const char* verb, const at::TensorBase& tensor);

// Returns `tensor` itself if it has these strides, else a copy with these strides.
at::Tensor with_strides(at::Tensor tensor, c10::IntArrayRef strides);
// Makes a DTensor with the local tensor `local`, which must have the local shape for the global `sizes` and must not
// require a gradient. Empty strides mean contiguous; `local` is then made contiguous. The first call registers the
// DTensor kernels.
at::Tensor make_dtensor(at::Tensor local, MeshPtr mesh, PlacementsPtr placements, c10::IntArrayRef sizes,
                        c10::IntArrayRef strides = {});

// Registers the PrivateUse3 kernels of all operations, once in a process. Thread-safe.
void ensure_registered();

}  // namespace tessera
