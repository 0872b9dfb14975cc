// Sharding rules of operations without tensor inputs that write new values to an existing DTensor (out=).
#include <ATen/ATen.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/rules/table.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {

namespace {

// Writes to this rank's `out` its part of a global identity matrix. The part starts at row `row` and column `column` of
// the global matrix.
LocalFunction ones_on_diagonal(int64_t row, int64_t column) {
  return [row, column](const LocalCall& local) {
    const at::Tensor out = local.arg(local.op.args.size() - 1).toTensor();
    out.zero_();
    const int64_t offset = row - column;  // local element (i, j) is the global element (i + row, j + column)
    if (offset < out.size(1) && -offset < out.size(0)) out.diagonal(offset).fill_(1);
    local.finish({out});
  };
}

// eye(n, out), eye(n, m, out): each rank writes its local tensor of `out`. `out` may have any Shard and Replicate
// placements.
void propose_eye(const OpCall& call, Proposal& proposal) {
  const TensorInput& out = call.outs.at(0);
  const int64_t n = call.int_at(0);
  const int m_arg = call.arg_named("m");
  const int64_t m = m_arg < 0 ? n : call.int_at(m_arg);
  for (const auto& placement : out.placements) {
    TESSERA_CHECK(
        placement.is_replicate() || placement.is_shard(), ErrorKind::kShape,
        "Sharding dimension mismatch: [dtensor.dispatch] {}: out has placements {}, wanted shards and replicas. "
        "Redistribute it first.",
        call.describe(), to_string(out.placements));
  }
  proposal.output({n, m});
  proposal.choice = PlacementChoice{{}, {out.placements}};
  proposal.local = [](const OpCall& of, const PlacementChoice& choice) -> LocalFunction {
    if (!of.mesh->coordinate()) return nullptr;
    const LocalBox box = local_box(of.outs[0].sizes.vec(), *of.mesh, choice.outputs[0]);
    return ones_on_diagonal(box.offset[0], box.offset[1]);
  };
}

}  // namespace

void add_factory_rules(RuleTable& table) { table.add({"aten::eye.out", "aten::eye.m_out"}, propose_eye); }

}  // namespace tessera
