// Random operations: only whole tensors, on which all ranks draw the same numbers from equal generators.
#include "tessera/base/error.h"
#include "tessera/dtensor/rules/table.h"

namespace tessera::detail {

namespace {

void propose_random(const OpCall& call, Proposal&) {
  for (const auto& input : call.inputs) {
    for (const auto& placement : input.placements) {
      TESSERA_CHECK(placement.is_replicate(), ErrorKind::kShape,
                    "[dtensor.dispatch] {}: random operations work on replicated tensors only, since the parts of a sharded "
                    "one would repeat each other's numbers. Redistribute to Replicate, or fill to_local().", call.describe());
    }
  }
}

}  // namespace

void add_random_rules(RuleTable& table) {
  table.add({"aten::native_dropout", "aten::bernoulli", "aten::normal", "aten::uniform", "aten::random", "aten::exponential",
             "aten::cauchy", "aten::log_normal", "aten::geometric", "aten::rand_like", "aten::randn_like",
             "aten::randint_like", "aten::multinomial"}, propose_random);
  table.add({"aten::native_dropout_backward"}, [](const OpCall& call, Proposal& proposal) {
    for (int64_t dim = 0; dim < call.inputs[0].dim(); ++dim) {
      proposal.strategies.push_back({{Shard(dim)}, {Shard(dim), Shard(dim)}});
    }
    proposal.output(call.inputs[0].sizes);
  });
}

}  // namespace tessera::detail
