// Sharding of the user's operations, said as a list of acceptable placements.
//
//   // my::scale(Tensor x, float by, Tensor bias) -> Tensor: rows are independent, bias is whole.
//   register_sharding("my::scale", [](const OpCall&) -> std::vector<AcceptableSharding> {
//     return {{{Shard(0)}, {Shard(0), std::nullopt, Replicate()}}};
//   });
//
// The plain form of register_rule (rule.h), with its threading and its errors, but a name that is taken: an operation
// that has a rule gets this one instead. Call it before the operation is first used on a DTensor.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/dtensor/dispatch/rule.h"

namespace tessera {

// On one mesh dim: inputs that lie so give outputs that lie so.
struct AcceptableSharding {
  std::vector<Placement> outputs;  // one a returned tensor
  std::vector<std::optional<Placement>>
      inputs;  // one an argument of the schema, in its order; none for what is no tensor
};

// "All replicated" always counts. Shapes of the results come from running the operation on meta tensors. Error kShape
// when the operation runs and a list does not fit its schema.
void register_sharding(const std::string& name,
                       std::function<std::vector<AcceptableSharding>(const OpCall&)> acceptable);

}  // namespace tessera
