// Memory of earlier snapshots, taken again for the next one: touching fresh pages costs more than the copies do.
// Internal to checkpoint.
//
//   at::Tensor copy = pool.copy(parameter);     // the caller goes on changing the parameter
//   pool.give_back(copy);                       // when it is written
//
// One thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <tuple>

namespace tessera {

class SnapshotPool {
 public:
  // A contiguous copy of a plain tensor, on the CPU. Of a tensor of an accelerator it is under way only, behind what
  // the current stream was given, and into pinned memory.
  at::Tensor copy(const at::Tensor& tensor);
  void give_back(const at::Tensor& copy);

 private:
  std::multimap<std::tuple<bool, c10::ScalarType, int64_t>, at::Tensor> free_;  // pinned, dtype, number of elements
};

}  // namespace tessera
