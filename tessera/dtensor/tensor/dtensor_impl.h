// The TensorImpl behind a DTensor: global sizes and strides, and inside it this rank's part as a plain tensor.
//
// Its dispatch keys are PrivateUse3 and the autograd keys, its device is that of the local tensor. Operations reach the
// kernel of dispatcher.cc through PrivateUse3, below autograd, so gradients are recorded on global shapes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include "tessera/dtensor/tensor/layout.h"
#include "tessera/dtensor/tensor/placement.h"
#include "tessera/mesh/device_mesh.h"

namespace tessera::detail {

inline constexpr c10::DispatchKey kDTensorKey = c10::DispatchKey::PrivateUse3;

// Placements as they are shared by tensors and cached plans; never changed once made.
struct SharedPlacements final : c10::intrusive_ptr_target {
  explicit SharedPlacements(Placements p);
  Placements values;
  c10::SmallVector<uint64_t, 4> words;  // the values as numbers, for cache keys
};
using PlacementsPtr = c10::intrusive_ptr<SharedPlacements>;
PlacementsPtr share(const Placements& placements);
uint64_t to_word(const Placement& placement);

// A local part that a collective is still making; shared by the DTensors that show it.
class PendingLocal {
 public:
  virtual ~PendingLocal() = default;
  virtual const at::Tensor& wait() = 0;  // COLLECTIVE work ends; then the part itself, contiguous
};

class DTensorImpl final : public c10::TensorImpl {
 public:
  // Sizes and strides are global and alike on all ranks; empty strides: contiguous. The part lies in memory as the whole
  // does, so that what can be viewed as a whole can be viewed in parts.
  DTensorImpl(at::Tensor local, MeshPtr mesh, PlacementsPtr placements, c10::IntArrayRef sizes,
              c10::IntArrayRef strides);

  // Waits for a part that is still being made.
  const at::Tensor& local() const {
    if (pending_) [[unlikely]] {
      settle();
    }
    return local_;
  }
  bool is_pending() const { return pending_ != nullptr; }
  // `local_` is then only an example of dtype and device.
  void set_pending(std::shared_ptr<PendingLocal> pending) { pending_ = std::move(pending); }
  const MeshPtr& mesh() const { return mesh_; }
  const PlacementsPtr& shared_placements() const { return placements_; }
  const Placements& placements() const { return placements_->values; }

  // A view of a dim that had to be gathered holds a copy: what is written to it would not reach the tensor it was taken of.
  bool copied_view() const { return copied_view_; }
  void mark_copied_view() { copied_view_ = true; }

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

  void settle() const;

  mutable at::Tensor local_;
  mutable std::shared_ptr<PendingLocal> pending_;
  MeshPtr mesh_;
  PlacementsPtr placements_;
  bool copied_view_ = false;
};

inline bool is_dtensor_impl(const c10::TensorImpl& impl) {
  return impl.key_set().has_backend(c10::BackendComponent::PrivateUse3Bit);
}
inline DTensorImpl* impl_of(const at::TensorBase& tensor) {
  return static_cast<DTensorImpl*>(tensor.unsafeGetTensorImpl());
}
// The impl of a DTensor; Error kShape for a plain tensor.
DTensorImpl& checked_impl(const char* verb, const at::TensorBase& tensor);

// A DTensor over `local`, which must be of the local shape and not require gradients. Empty strides: contiguous, and
// `local` is made so. Makes sure that the kernels are registered.
at::Tensor make_dtensor(at::Tensor local, MeshPtr mesh, PlacementsPtr placements, c10::IntArrayRef sizes,
                        c10::IntArrayRef strides = {});

// Registers the PrivateUse3 kernels of all operations once in the process. Thread-safe.
void ensure_registered();

}  // namespace tessera::detail
