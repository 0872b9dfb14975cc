// Sharding of a user's operations, given as a list of acceptable placements.
//
//   // my::scale(Tensor x, float by, Tensor bias) -> Tensor: rows are independent, bias is whole.
//   register_sharding("my::scale", [](const OpCall&) -> std::vector<AcceptableSharding> {
//     return {{{Shard(0)}, {Shard(0), std::nullopt, Replicate()}}};
//   });
//
// This is a simpler form of register_rule (rule.h), with the same threading and the same errors. The difference is that
// an operation with a rule gets the new rule instead. Call it before the operation is first used on a DTensor.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/dtensor/dispatch/rule.h"

namespace tessera {

// One acceptable combination on one mesh dim: inputs with these placements give outputs with these placements.
struct AcceptableSharding {
  std::vector<Placement> outputs;  // one for each returned tensor
  std::vector<std::optional<Placement>>
      inputs;  // one for each argument of the schema, in order; nullopt for arguments that are not tensors
};

// "All replicated" is always acceptable. Output shapes come from running the operation on meta tensors. Error kShape,
// when the operation runs, for a list that does not match the schema.
void register_sharding(const std::string& name,
                       std::function<std::vector<AcceptableSharding>(const OpCall&)> acceptable);

}  // namespace tessera
