// One managed parameter of a fully_shard group: the sharded DTensor that users see and how forward reads it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/module.h"

namespace tessera::parallel {

// A slot by owner and position: the owner's list may grow.
struct SlotRef {
  nn::Module* owner;
  size_t index;
  nn::ParameterSlot& get() const { return owner->own_parameters()[index]; }
};

struct ShardedParam {
  std::string name;
  std::vector<SlotRef> slots;  // more than one: tied
  std::vector<int64_t> shape;  // of the whole parameter
  c10::ScalarType dtype;       // as stored and optimized
  c10::ScalarType gather_dtype;
  at::Tensor parameter;  // the DTensor
  at::Tensor local;      // its local part
  at::Tensor whole;      // the gathered parameter; its storage is empty while resharded

  int64_t rows() const { return shape[0]; }
  int64_t row_numel() const {
    int64_t n = 1;
    for (size_t d = 1; d < shape.size(); ++d) n *= shape[d];
    return n;
  }
  int64_t numel() const { return rows() * row_numel(); }
  // `part`, shaped like the local part, as a DTensor that lies on `mesh` as the parameter does.
  at::Tensor distributed(const at::Tensor& part, const MeshPtr& mesh) const;
};

}  // namespace tessera::parallel
