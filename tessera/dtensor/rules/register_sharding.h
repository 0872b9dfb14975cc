// Registers the sharding of an operation as a list of acceptable placements, as
// torch.distributed.tensor.experimental.register_sharding does.
//
//   // my::scale(Tensor x, float by, Tensor bias) -> Tensor: rows are independent, bias is replicated.
//   register_sharding("my::scale", [](const OpCall&) -> std::vector<AcceptableSharding> {
//     return {{{Shard(0)}, {Shard(0), std::nullopt, Replicate()}}};
//   });
//
// This is a simpler form of register_rule (dispatch/rule.h). It is thread-safe and raises the errors of register_rule,
// except that a rule that the operation has already is replaced. Call it before the operation is first used on a
// DTensor.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/dtensor/dispatch/rule.h"

namespace tessera {

// One acceptable combination of placements on one mesh dim: if the inputs have the placements `inputs`, the operation
// on the local tensors gives outputs with the placements `outputs`.
struct AcceptableSharding {
  std::vector<Placement> outputs;  // one for each returned tensor
  std::vector<std::optional<Placement>>
      inputs;  // one for each argument of the schema, in order; nullopt for arguments that are not tensors
};

// "All replicated" is always acceptable. Output shapes come from running the operation on meta tensors. A call of the
// operation raises Error kShape if a list returned by `acceptable` does not match the schema.
void register_sharding(const std::string& name,
                       std::function<std::vector<AcceptableSharding>(const OpCall&)> acceptable);

}  // namespace tessera
