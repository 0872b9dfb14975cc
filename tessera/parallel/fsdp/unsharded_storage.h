// The memory of a group's unsharded parameters: one c10::Storage whose memory is freed and allocated again. Autograd
// saves views of the storage in forward. The memory may then be freed, and must be filled again before backward reads
// the views.
//
//   UnshardedStorage storage(device);
//   storage.fill(*pool, bytes);
//   at::Tensor weight = storage.tensor(0, {8, 4}, at::kFloat);
//   storage.free("layer: its parameters are freed");       // reading `weight` throws this text, until the next fill
//
// Belongs to one rank.
#pragma once

#include <ATen/core/TensorBase.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <string>

#include "tessera/parallel/data_parallel/buffer_pool.h"

namespace tessera {

// A tensor over part of a storage, with a version counter of its own.
at::Tensor tensor_over(const c10::Storage& storage, int64_t offset_bytes, c10::IntArrayRef shape,
                       c10::ScalarType dtype);

class UnshardedStorage {
 public:
  explicit UnshardedStorage(c10::Device device) : device_(device) {}
  // Gives the storage `bytes` bytes of uninitialised memory. The first form takes the memory from the pool, the second
  // form uses `memory`.
  void fill(BufferPool& pool, int64_t bytes);
  void fill(c10::DataPtr memory, int64_t bytes);
  // Takes the memory out of the storage and returns it; the caller frees it when no stream uses it any more. Reading
  // the storage then throws an error with the text `why`.
  c10::DataPtr free(const std::string& why);
  // Returns a tensor over part of the storage. tensor() must not be called before the first fill().
  at::Tensor tensor(int64_t offset_bytes, c10::IntArrayRef shape, c10::ScalarType dtype) const;

 private:
  c10::Device device_;
  c10::Storage storage_;
};

}  // namespace tessera
