#include "tessera/parallel/fsdp/unsharded_storage.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/strides.h>

#include <utility>

namespace tessera {
namespace {

// forbid_access makes a read of freed memory throw `why`, and allow_access undoes this. libtorch 2.11 has no function
// to undo it: with that version a read meets a null pointer instead.
template <class Storage>
void forbid_access(Storage& storage, std::string why) {
  if constexpr (requires { storage.clear_data_ptr_access_error_msg_(); }) {
    storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(why));
  }
}
template <class Storage>
void allow_access(Storage& storage) {
  if constexpr (requires { storage.clear_data_ptr_access_error_msg_(); }) storage.clear_data_ptr_access_error_msg_();
}

}  // namespace

at::Tensor tensor_over(const c10::Storage& storage, int64_t offset_bytes, c10::IntArrayRef shape,
                       c10::ScalarType dtype) {
  return at::empty({0}, at::TensorOptions().dtype(dtype).device(storage.device()))
      .set_(storage, offset_bytes / static_cast<int64_t>(c10::elementSize(dtype)), shape,
            c10::contiguous_strides(shape));
}

void UnshardedStorage::fill(BufferPool& pool, int64_t bytes) {
  fill(pool.allocate(static_cast<size_t>(bytes), device_), bytes);
}

void UnshardedStorage::fill(c10::DataPtr memory, int64_t bytes) {
  if (!storage_) {
    storage_ = c10::Storage(c10::Storage::use_byte_size_t{}, 0, c10::DataPtr(nullptr, device_), nullptr, false);
  }
  auto* storage = storage_.unsafeGetStorageImpl();
  allow_access(*storage);
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(static_cast<size_t>(bytes));
}

c10::DataPtr UnshardedStorage::free(const std::string& why) {
  if (!storage_) return {};
  auto* storage = storage_.unsafeGetStorageImpl();
  // The byte size of the storage is not set to 0 although its memory is freed, because libtorch checks the byte size
  // when a view of the storage is made.
  c10::DataPtr memory = storage->set_data_ptr(c10::DataPtr(nullptr, device_));
  forbid_access(*storage, why);
  return memory;
}

at::Tensor UnshardedStorage::tensor(int64_t offset_bytes, c10::IntArrayRef shape, c10::ScalarType dtype) const {
  return tensor_over(storage_, offset_bytes, shape, dtype);
}

}  // namespace tessera
