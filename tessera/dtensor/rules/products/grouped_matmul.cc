// Sharding rules of the product of two scaled matrices (_scaled_mm) and of one product for each group of rows or
// matrices (_grouped_mm).
#include <ATen/ATen.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/rules/table.h"

namespace tessera {

namespace {

// Returns the placement of a scale tensor if its matrix has placement `data`. A scale has one value, one value for each
// row ([m, 1]) or column ([1, n]), or one for each block, as a 1-d list. nullopt: the matrix must not have this
// placement, because a 1-d list cannot be divided along the summed dim.
std::optional<Placement> scale_placement(const TensorInput& scale, const Placement& data, int64_t summed_dim) {
  if (c10::multiply_integers(scale.sizes) == 1 || !data.is_any_shard()) return Replicate();
  if (scale.dim() == 1) return data.dim == summed_dim ? std::nullopt : std::optional<Placement>(Shard(0));
  return scale.sizes[data.dim] == 1 ? Replicate() : data;
}

// _scaled_mm(self [m, k], mat2 [k, n], scale_a, scale_b, bias?, scale_result?, ...)
void propose_scaled(const OpCall& call, Proposal& proposal) {
  const bool has_bias = call.has(4) && call.input_at(4) >= 0;
  const auto add = [&](const Placement& output, const Placement& self, const Placement& other, const Placement& bias) {
    const auto scale_a = scale_placement(call.inputs[2], self, 1);
    const auto scale_b = scale_placement(call.inputs[3], other, 0);
    if (!scale_a || !scale_b || (has_bias && output.is_partial())) return;
    Strategy strategy{{output}, {self, other, *scale_a, *scale_b}};
    if (has_bias) strategy.inputs.push_back(bias);
    proposal.strategies.push_back(replicate_rest(call, std::move(strategy)));
  };
  add(Shard(0), Shard(0), Replicate(), Replicate());
  add(Shard(1), Replicate(), Shard(1), Shard(0));
  add(Partial(), Shard(1), Shard(0), Replicate());
  for (const Placement& p : partials_among(call)) {
    if (is_additive(p)) {
      add(p, p, Replicate(), Replicate());
      add(p, Replicate(), p, Replicate());
    }
  }
  proposal.supports_empty_shards = false;
  // The kernels of devices require mat2 in column-major memory, but a local tensor that was redistributed is row-major.
  // So mat2 is copied to column-major memory.
  proposal.local = [](const OpCall&, const PlacementChoice&) -> LocalFunction {
    return [](const LocalCall& part) {
      c10::IValue& other = part.arg(1);
      other = other.toTensor().t().contiguous().t();
      part.call();
    };
  };
  proposal.output({call.inputs[0].sizes[0], call.inputs[1].sizes[1]});
}

// Whether each rank's shard is a multiple of 16 bytes long in the contiguous dim, which the kernel requires. True if
// another dim is sharded.
bool keeps_alignment(const OpCall& call, const TensorInput& input, const Placement& placement) {
  if (!placement.is_any_shard() || input.tensor->strides()[placement.dim] != 1) return true;
  const int64_t ranks = call.mesh->size();
  const int64_t n = input.sizes[placement.dim];
  return n % ranks == 0 && n / ranks * static_cast<int64_t>(input.tensor->element_size()) % 16 == 0;
}

// Returns the local tensor in a layout that the kernel accepts: one of the last two dims has stride 1 and the stride of
// the other is a multiple of 16 bytes. A tensor with other strides is copied to rows that are padded in memory.
at::Tensor aligned(const at::Tensor& part) {
  const int64_t piece = 16 / static_cast<int64_t>(part.element_size());
  const int64_t columns = part.size(-1);
  const bool by_columns = part.stride(-2) == 1 && part.stride(-1) >= std::max<int64_t>(part.size(-2), 1);
  const bool by_rows = part.stride(-1) == 1 && part.stride(-2) >= std::max<int64_t>(columns, 1);
  if (by_columns ? part.stride(-1) % piece == 0 : by_rows && part.stride(-2) % piece == 0) return part;
  Sizes sizes(part.sizes().begin(), part.sizes().end());
  sizes.back() = (std::max<int64_t>(columns, 1) + piece - 1) / piece * piece;
  at::Tensor rows = at::empty(sizes, part.options()).narrow(-1, 0, columns);
  return rows.copy_(part);
}

LocalFunction with_aligned_parts(const OpCall&, const PlacementChoice&) {
  return [](const LocalCall& local) {
    for (const size_t operand : {0, 1}) local.arg(operand) = aligned(local.arg(operand).toTensor());
    local.call();
  };
}

// _grouped_mm(self, mat2, offs?, bias?). A 2-d operand holds the groups one after another; offs[i] is the end of group
// i. In a 3-d operand dim 0 is the group.
void propose_grouped(const OpCall& call, Proposal& proposal) {
  const TensorInput& a = call.inputs[0];
  const TensorInput& b = call.inputs[1];
  const bool has_bias = call.has(3) && call.input_at(3) >= 0;
  const auto add = [&](const Placement& output, const Placement& left, const Placement& right) {
    if (!keeps_alignment(call, a, left) || !keeps_alignment(call, b, right) || has_bias) return;
    proposal.strategies.push_back(replicate_rest(call, {{output}, {left, right}}));
  };
  for (const Placement& p : partials_among(call)) {
    if (p.is_partial(ReduceOp::kSum)) {
      add(p, p, Replicate());
      add(p, Replicate(), p);
    }
  }
  const int64_t columns = b.dim() - 1;
  if (a.dim() == 2 && b.dim() == 3) {
    add(Shard(1), Replicate(), Shard(2));
    add(Partial(), Shard(1), Shard(1));
    proposal.output({a.sizes[0], b.sizes[columns]});
  } else if (a.dim() == 3 && b.dim() == 2) {
    add(Partial(), Shard(2), Shard(0));
    add(Shard(0), Shard(1), Replicate());
    proposal.output({a.sizes[1], b.sizes[columns]});
  } else if (a.dim() == 2) {
    add(Shard(2), Replicate(), Shard(1));
    add(Shard(1), Shard(0), Replicate());
    const int offsets = call.input_at(2);
    TESSERA_CHECK(offsets >= 0, ErrorKind::kShape,
                  "[dtensor.dispatch] {}: found no offs, wanted the end of each group.", call.describe());
    proposal.output({call.inputs[offsets].sizes[0], a.sizes[0], b.sizes[columns]});
  } else {
    add(Shard(2), Replicate(), Shard(2));
    add(Shard(1), Shard(1), Replicate());
    add(Partial(), Shard(2), Shard(1));
    add(Shard(0), Shard(0), Shard(0));
    proposal.output({a.sizes[0], a.sizes[1], b.sizes[columns]});
  }
  proposal.local = with_aligned_parts;
  proposal.supports_empty_shards = false;
}

}  // namespace

void add_grouped_matmul_rules(RuleTable& table) {
  table.add("aten::_scaled_mm", propose_scaled);
  table.add("aten::_grouped_mm", propose_grouped);
}

}  // namespace tessera
