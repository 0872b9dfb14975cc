// Operations that make tensors, view them in another way, or change their memory. The CPU's kernels do not do this for
// another device. None of these operations launches a kernel.
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "tests/support/pretend_device/memory.h"
#include "tests/support/pretend_device/order.h"
#include "tests/support/pretend_device/registration.h"

namespace tessera::pretend {
namespace {

using Type = std::optional<at::ScalarType>;
using Sizes = at::IntArrayRef;

void refuse_pinned(std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "[pretend] pinned memory is the host's");
}

c10::OptionalDeviceGuard on(std::optional<at::Device> device) { return c10::OptionalDeviceGuard(device); }

at::Tensor empty(Sizes sizes, Type type, std::optional<at::Layout>, std::optional<at::Device> device,
                 std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  refuse_pinned(pinned);
  const auto guard = on(device);
  return at::detail::empty_generic(sizes, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(Sizes sizes, Sizes strides, Type type, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool> pinned) {
  refuse_pinned(pinned);
  const auto guard = on(device);
  return at::detail::empty_strided_generic(sizes, strides, device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(type));
}

void grow(c10::TensorImpl* self, size_t bytes) {
  if (self->numel() > 0 && bytes > self->unsafe_storage().nbytes()) {
    resize_bytes(self->unsafe_storage().unsafeGetStorageImpl(), bytes);
  }
}

const at::Tensor& resize(const at::Tensor& self, Sizes sizes, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!format || *format == at::MemoryFormat::Contiguous, "[pretend] resize_ to another memory format");
  auto* const impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  grow(impl,
       at::detail::computeStorageNbytesContiguous(sizes, self.itemsize(), static_cast<size_t>(self.storage_offset())));
  return self;
}

at::Tensor& set_storage_offset(at::Tensor& self, at::Storage source, int64_t offset, Sizes sizes, Sizes strides) {
  TORCH_CHECK(source.device_type() == c10::kPrivateUse1, "[pretend] set_: a storage on ", source.device());
  auto* const impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (strides.empty() && !sizes.empty()) {
    impl->set_sizes_contiguous(sizes);
  } else {
    impl->set_sizes_and_strides(sizes, strides);
  }
  grow(impl,
       at::detail::computeStorageNbytes(impl->sizes(), impl->strides(), self.itemsize(), static_cast<size_t>(offset)));
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto elements = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage_offset(self, std::move(source), 0, {elements}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_empty(at::Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t{}, 0, device_allocator()->allocate(0), device_allocator(), true);
  return set_storage_offset(self, std::move(none), 0, {0}, {1});
}

void record_stream(at::Tensor& self, at::Stream stream) { record_block(self.storage().data(), stream); }

}  // namespace

void register_operations() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  library.impl("unfold", TORCH_FN(at::native::unfold));
  library.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  library.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  library.impl("resize_", TORCH_FN(resize));
  library.impl("set_.source_Storage", TORCH_FN(set_storage));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage_offset));
  library.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  library.impl("set_", TORCH_FN(set_empty));
  library.impl("is_set_to", TORCH_FN(at::native::is_set_to));
  library.impl("record_stream", TORCH_FN(record_stream));
}

}  // namespace tessera::pretend
