// Reuses the host memory of earlier snapshots, because the page faults of new memory cost more than the copies.
// Internal to checkpoint.
//
//   at::Tensor copy = pool.copy(parameter);     // afterwards a CPU parameter may change
//   pool.recycle(copy);                         // when the copy is written
//
// Not thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <tuple>

namespace tessera {

class SnapshotPool {
 public:
  // Returns a contiguous CPU copy of a plain tensor. A copy from an accelerator goes into pinned memory and is
  // asynchronous on the current stream.
  at::Tensor copy(const at::Tensor& tensor);
  void recycle(const at::Tensor& copy);

 private:
  std::multimap<std::tuple<bool, c10::ScalarType, int64_t>, at::Tensor>
      free_;  // by (pinned, dtype, number of elements)
};

}  // namespace tessera
