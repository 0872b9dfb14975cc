// Runs a function that is written for plain tensors on the local tensors of DTensors.
//
//   auto mm = local_map([](const std::vector<at::Tensor>& parts) { return std::vector{at::mm(parts[0], parts[1])}; },
//                       {.out_placements = {Placements{Partial()}},
//                        .in_placements = {{Placements{Shard(1)}, Placements{Shard(0)}}}});
//   at::Tensor y = mm({a, b})[0];                       // a DTensor
//
// The function may communicate. local_map itself communicates only for redistribute_inputs. Differentiable. Errors have
// the kind kShape.
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
  // One entry for each output; nullopt returns the output unchanged.
  List out_placements;
  // One entry for each input, nullopt for an undefined tensor. Plain tensors are passed unchanged. Without this list
  // inputs may have any placements.
  std::optional<List> in_placements = std::nullopt;
  // Placements of the gradients of the local tensors, as `grad_placements` of to_local.
  std::optional<List> in_grad_placements = std::nullopt;
  MeshPtr device_mesh = nullptr;  // mesh of the outputs; default: the mesh of the first DTensor
  // Redistribute inputs to in_placements instead of raising an error. COLLECTIVE over the mesh.
  bool redistribute_inputs = false;
};

// Returns a function that runs `function` as described above. Inputs without any DTensor are passed unchanged.
TensorsFunction local_map(TensorsFunction function, LocalMapOptions options);

}  // namespace tessera
