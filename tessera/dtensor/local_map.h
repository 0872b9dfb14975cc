// Runs a function that is written for plain tensors on the local tensors of DTensors.
//
//   auto mm = local_map([](const std::vector<at::Tensor>& parts) { return std::vector{at::mm(parts[0], parts[1])}; },
//                       {.out_placements = {Placements{Partial()}},
//                        .in_placements = {{Placements{Shard(1)}, Placements{Shard(0)}}}});
//   at::Tensor y = mm({a, b})[0];                       // a DTensor
//
// The function may communicate. local_map itself communicates only if redistribute_inputs is set and an input has other
// placements. The result is differentiable. Errors have the kind kShape.
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
  // One entry for each output of the function. nullopt: local_map returns the output unchanged, not as a DTensor.
  List out_placements;
  // Placements that the inputs must have: one entry for each input, nullopt for an undefined tensor. Plain tensors are
  // passed to the function unchanged. Without this list inputs may have any placements.
  std::optional<List> in_placements = std::nullopt;
  // Placements of the gradients of the local tensors, one entry for each input; see `grad_placements` of to_local.
  std::optional<List> in_grad_placements = std::nullopt;
  MeshPtr device_mesh = nullptr;  // mesh of the outputs; default: the mesh of the first DTensor
  // true: inputs with other placements are redistributed to in_placements, which is COLLECTIVE over the mesh. false:
  // they raise an error.
  bool redistribute_inputs = false;
};

// Returns a function that calls `function` with the local tensors of its inputs. If no input is a DTensor, inputs and
// outputs are passed unchanged.
TensorsFunction local_map(TensorsFunction function, LocalMapOptions options);

}  // namespace tessera
