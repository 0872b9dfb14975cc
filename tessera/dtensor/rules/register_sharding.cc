#include "tessera/dtensor/rules/register_sharding.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/rules/table.h"

namespace tessera {

// AcceptableSharding::inputs has one entry for each argument of the schema, but Strategy::inputs has one for each
// tensor of the call, so the placements are converted.
void register_sharding(const std::string& name,
                       std::function<std::vector<AcceptableSharding>(const OpCall&)> acceptable) {
  replace_rule(name, [acceptable = std::move(acceptable)](const OpCall& call, Proposal& proposal) {
    for (const auto& sharding : acceptable(call)) {
      TESSERA_CHECK(sharding.inputs.size() == call.op.args.size(), ErrorKind::kShape,
                    "[dtensor.register_sharding] {}: found placements for {} inputs, wanted {}, one for each argument "
                    "(nullopt for arguments that are not tensors).",
                    call.describe(), sharding.inputs.size(), call.op.args.size());
      Strategy strategy;
      strategy.outputs.assign(sharding.outputs.begin(), sharding.outputs.end());
      for (const auto& input : call.inputs) {
        const auto& placement = sharding.inputs[input.arg];
        TESSERA_CHECK(placement.has_value(), ErrorKind::kShape,
                      "[dtensor.register_sharding] {}: found no placement for the tensor '{}'. Give one.",
                      call.describe(), call.op.args[input.arg].name);
        strategy.inputs.push_back(*placement);
      }
      proposal.strategies.push_back(std::move(strategy));
    }
  });
}

}  // namespace tessera
