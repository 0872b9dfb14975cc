// Runs a function that is written for plain tensors on the parts of DTensors.
//
//   auto mm = local_map([](const std::vector<at::Tensor>& parts) { return std::vector{at::mm(parts[0], parts[1])}; },
//                       {.out_placements = {Placements{Partial()}},
//                        .in_placements = {{Placements{Shard(1)}, Placements{Shard(0)}}}});
//   at::Tensor y = mm({a, b})[0];                       // a DTensor
//
// The function communicates or not as it likes; local_map does only for redistribute_inputs. Differentiable. Errors
// kShape.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <vector>

#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {

using TensorsFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

struct LocalMapOptions {
  using List = std::vector<std::optional<Placements>>;
  // One for each output; none: the output stays as it is.
  List out_placements;
  // One for each input, none for what is no tensor (an undefined one). Plain tensors are passed as they are. Not given:
  // inputs may lie as they like.
  std::optional<List> in_placements = std::nullopt;
  // How the gradients of the parts lie; as to_local's grad_placements.
  std::optional<List> in_grad_placements = std::nullopt;
  MeshPtr device_mesh = nullptr;     // of the outputs; default: the first DTensor's
  bool redistribute_inputs = false;  // bring inputs to in_placements instead of an error. COLLECTIVE over the mesh
};

// Without any DTensor among the inputs the function runs as it is.
TensorsFunction local_map(TensorsFunction function, LocalMapOptions options);

}  // namespace tessera
