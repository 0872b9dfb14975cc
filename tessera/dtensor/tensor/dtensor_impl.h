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

namespace tessera {

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

// Gives a local part that is not simply there; shared by the DTensors that show it.
class LocalSource {
 public:
  virtual ~LocalSource() = default;
  // A collective that is still making it ends, or COLLECTIVE over the mesh it is made again. Then the part itself.
  virtual const at::Tensor& part() = 0;
  // False: a collective is making it, once. True: a view of a dim that had to be gathered is a copy, which is made
  // again when what it was taken of was written to; what were written to it itself would not get there.
  virtual bool is_copied_view() const = 0;
};

class DTensorImpl final : public c10::TensorImpl {
 public:
  // Sizes and strides are global and alike on all ranks; empty strides: contiguous. The part lies in memory as the
  // whole does, so that what can be viewed as a whole can be viewed in parts.
  DTensorImpl(at::Tensor local, MeshPtr mesh, PlacementsPtr placements, c10::IntArrayRef sizes,
              c10::IntArrayRef strides);

  // Waits for a part that is still being made.
  const at::Tensor& local() const {
    if (source_) [[unlikely]] {
      settle();
    }
    return local_;
  }
  bool is_pending() const { return source_ != nullptr && !source_->is_copied_view(); }
  bool is_copied_view() const { return source_ != nullptr && source_->is_copied_view(); }
  // `local_` is then only an example of dtype and device.
  void set_source(std::shared_ptr<LocalSource> source) { source_ = std::move(source); }
  const std::shared_ptr<LocalSource>& source() const { return source_; }
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

  void settle() const;

  MeshPtr mesh_;  // first, to go last: it owns the groups that a source may be at work on
  PlacementsPtr placements_;
  mutable at::Tensor local_;
  mutable std::shared_ptr<LocalSource> source_;
};

inline bool is_dtensor_impl(const c10::TensorImpl& impl) {
  return impl.key_set().has_backend(c10::BackendComponent::PrivateUse3Bit);
}
inline DTensorImpl* impl_of(const at::TensorBase& tensor) {
  return static_cast<DTensorImpl*>(tensor.unsafeGetTensorImpl());
}
// The impl of a DTensor; Error kShape for a plain tensor.
DTensorImpl& checked_impl(const char* verb, const at::TensorBase& tensor);

// `tensor`, or a copy of it that lies in memory so.
at::Tensor lying_as(at::Tensor tensor, c10::IntArrayRef strides);
// A DTensor over `local`, which must be of the local shape and not require gradients. Empty strides: contiguous, and
// `local` is made so. Makes sure that the kernels are registered.
at::Tensor make_dtensor(at::Tensor local, MeshPtr mesh, PlacementsPtr placements, c10::IntArrayRef sizes,
                        c10::IntArrayRef strides = {});

// Registers the PrivateUse3 kernels of all operations once in the process. Thread-safe.
void ensure_registered();

}  // namespace tessera
