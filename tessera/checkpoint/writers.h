// Which rank writes which part of a checkpoint, so that each part is written once and the ranks write about equally
// much. Internal to checkpoint.
//
//   Writers writers(world->rank(), {0, 1, 2, 3});      // the ranks whose tensors are called as this one's
//   for (const auto& [name, tensor] : tensors) if (writers.write_here(tensor)) ...
//
// Each of the ranks asks for the same tensors in the same order and gets answers that fit together; nothing is
// communicated. A replica goes to the rank that has the least to write so far. A DTensor over some of the ranks only is
// written in the mesh that the first rank is in, by its first replica.
#pragma once

#include <ATen/core/TensorBase.h>

#include <cstdint>
#include <map>
#include <vector>

namespace tessera {

class Writers {
 public:
  Writers(int rank, const std::vector<int>& holders);

  // Whether this rank writes its part of the next tensor.
  bool write_here(const at::TensorBase& tensor);
  // Whether it writes what there is one of and all holders have, however small.
  bool first() const { return rank_ == first_; }

 private:
  bool write_plain(int64_t bytes);
  bool write_part(const at::TensorBase& tensor);

  int rank_;
  int first_;
  std::map<int, int64_t> bytes_;  // that each holder writes, of what all of them know of
};

}  // namespace tessera
