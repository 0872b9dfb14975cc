// Sharding rules of matrix decompositions and linear solvers. Batch dims may be sharded; the dims of the matrices must
// not be.
#include <ATen/ATen.h>

#include <exception>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/rules/table.h"

namespace tessera {

namespace {

constexpr int kBroadcast = -1;  // a result with the broadcast batch dims of all operands

struct LinalgResult {
  int core;                // number of dims after the batch dims
  int batch = kBroadcast;  // or the index of the operand whose batch dims the result has
};

struct LinalgSignature {
  std::vector<int> cores;  // for each tensor argument: number of dims after the batch dims
  std::vector<LinalgResult> results;
  int linear_in = -1;                                           // operand in which the first result is linear
  std::vector<OutputShape> (*shapes)(const OpCall&) = nullptr;  // null: shapes come from the meta kernel
  bool raises = false;  // the kernel raises for some values, without an argument check_errors
};

c10::IntArrayRef batch_of(const TensorInput& input, int core) {
  return input.sizes.slice(0, std::max<int64_t>(input.dim() - core, 0));
}

// Returns the entry of signature.cores (the number of dims after the batch dims) for each input of this call. Optional
// tensor arguments that the call leaves out have no entry in the result.
std::vector<int> cores_of(const OpCall& call, const LinalgSignature& signature) {
  std::vector<int> cores;
  for (const auto& input : call.inputs) {
    const auto& args = call.op.tensor_args;
    cores.push_back(signature.cores.at(std::ranges::find(args, input.arg) - args.begin()));
  }
  return cores;
}

Sizes broadcast_batch(const OpCall& call, const std::vector<int>& cores) {
  Sizes batch;
  for (size_t i = 0; i < cores.size(); ++i) {
    const auto own = batch_of(call.inputs[i], cores[i]);
    if (own.size() > batch.size()) batch.insert(batch.begin(), own.size() - batch.size(), 1);
    for (size_t d = 0; d < own.size(); ++d) {
      int64_t& size = batch[batch.size() - own.size() + d];
      size = size == 1 ? own[d] : size;
    }
  }
  return batch;
}

Placement over_batch(c10::IntArrayRef own, c10::IntArrayRef batch, size_t dim) {
  const size_t missing = batch.size() - own.size();
  return dim < missing || (own[dim - missing] == 1 && batch[dim] != 1) ? Replicate() : Shard(dim - missing);
}

// Returns a function that runs a kernel which may raise an error because of the values of its operands; null when no
// operand is sharded. If the kernel raises on one rank, the function raises on all ranks. Otherwise the other ranks
// would wait for that rank in the next collective. The function is COLLECTIVE over the mesh dims that shard operands.
LocalFunction with_shared_failure(const OpCall& call, const PlacementChoice& choice) {
  std::vector<int64_t> mesh_dims;
  for (int64_t m = 0; m < call.mesh->ndim(); ++m) {
    if (call.mesh->shape()[m] > 1 &&
        std::ranges::any_of(choice.inputs, [m](const Placements& input) { return input[m].is_any_shard(); })) {
      mesh_dims.push_back(m);
    }
  }
  if (mesh_dims.empty()) return nullptr;
  return [mesh_dims](const LocalCall& local) {
    const at::Tensor failed = at::zeros({1}, at::TensorOptions(local.mesh.device()).dtype(at::kByte));
    std::exception_ptr own;
    try {
      local.call();
    } catch (const std::exception&) {
      own = std::current_exception();
      failed.fill_(1);
    }
    for (const int64_t m : mesh_dims) {
      comm::all_reduce(*local.mesh.group(m), failed, ReduceOp::kMax, local.op.name).wait();
    }
    if (own) std::rethrow_exception(own);
    TESSERA_CHECK(failed.item<uint8_t>() == 0, ErrorKind::kShape,
                  "[dtensor.dispatch] {}: failed for matrices on another rank; the message of that rank gives the "
                  "reason. Check the values of these matrices.",
                  local.op.name);
  };
}

// Proposes for each batch dim a strategy that shards this dim in all operands and results that have the dim.
void propose(const OpCall& call, Proposal& proposal, const LinalgSignature& signature) {
  const auto cores = cores_of(call, signature);
  const Sizes batch = broadcast_batch(call, cores);
  if (call.op.return_alias.empty() || call.op.return_alias[0] < 0) {
    proposal.outputs = signature.results.empty()     ? std::vector<OutputShape>()
                       : signature.shapes != nullptr ? signature.shapes(call)
                                                     : infer_outputs(call);
  }
  for (size_t dim = 0; dim < batch.size(); ++dim) {
    Strategy strategy;
    for (size_t i = 0; i < cores.size(); ++i) {
      strategy.inputs.push_back(over_batch(batch_of(call.inputs[i], cores[i]), batch, dim));
    }
    for (size_t i = 0; i < signature.results.size(); ++i) {
      const LinalgResult& result = signature.results[i];
      Placement placement = result.batch == kBroadcast ? Shard(dim) : strategy.inputs[result.batch];
      if (i < proposal.outputs.size()) {  // a result that was not requested is an empty tensor
        const bool there = proposal.outputs[i].sizes.size() >= static_cast<size_t>(result.core) + 1;
        placement = placement.is_any_shard() && !there ? Replicate() : placement;
      }
      strategy.outputs.push_back(placement);
    }
    proposal.strategies.push_back(std::move(strategy));
  }
  for (const Placement& p : partials_among(call)) {
    if (signature.linear_in >= 0 && is_additive(p)) {
      Strategy strategy = pass_through(p, signature.linear_in, call.inputs.size());
      strategy.outputs.resize(signature.results.size(), Replicate());
      proposal.strategies.push_back(std::move(strategy));
    }
  }
  proposal.supports_empty_shards = false;
  const int check = call.arg_named("check_errors");
  if (signature.raises || (check >= 0 && call.bool_at(check))) proposal.local = with_shared_failure;
}

Rule matrices(LinalgSignature signature) {
  return [signature](const OpCall& call, Proposal& proposal) { propose(call, proposal, signature); };
}

std::vector<int64_t> joined(c10::IntArrayRef batch, std::initializer_list<int64_t> core) {
  std::vector<int64_t> sizes = batch.vec();
  sizes.insert(sizes.end(), core);
  return sizes;
}

std::vector<OutputShape> like_first(const OpCall& call) { return {{call.inputs[0].sizes.vec(), {}}}; }

// Returns the shape of a result that has the matrix shape of operand i and the broadcast batch dims of all operands.
template <int i>
std::vector<OutputShape> like_operand(const OpCall& call) {
  std::vector<int> cores;
  for (const auto& input : call.inputs) {
    cores.push_back(input.tensor->scalar_type() == at::kInt ? 1 : 2);  // pivots (int) are a list for each matrix
  }
  const auto& core = call.inputs[i].sizes;
  return {{joined(broadcast_batch(call, cores), {core[core.size() - 2], core.back()}), {}}};
}

std::vector<OutputShape> factored(const OpCall& call) {
  const auto& sizes = call.inputs[0].sizes;
  const int64_t least = std::min(sizes[sizes.size() - 2], sizes.back());
  return {{sizes.vec(), {}}, {joined(sizes.slice(0, sizes.size() - 2), {least}), {}}};
}

std::vector<OutputShape> eigen(const OpCall& call) {
  const auto& sizes = call.inputs[0].sizes;
  const auto complex = at::toComplexType(call.inputs[0].tensor->scalar_type());
  return {{joined(sizes.slice(0, sizes.size() - 1), {}), {}, complex}, {sizes.vec(), {}, complex}};
}

std::vector<OutputShape> pseudo_inverse(const OpCall& call) {
  const auto& sizes = call.inputs[0].sizes;
  return {{joined(sizes.slice(0, sizes.size() - 2), {sizes.back(), sizes[sizes.size() - 2]}), {}}};
}

// _linalg_solve_ex(A, B): B is a batch of vectors if its shape is that of A without the last dim.
void propose_solve(const OpCall& call, Proposal& proposal) {
  const auto& a = call.inputs[0].sizes;
  const auto& b = call.inputs[1].sizes;
  const int core = b.size() == 1 || (b.size() + 1 == a.size() && b == a.slice(0, a.size() - 1)) ? 1 : 2;
  propose(call, proposal, {{2, core}, {{core}, {2, 0}, {1, 0}, {0, 0}}, 1});
}

// linalg_cross(self, other, dim): all dims but `dim` may be sharded.
void propose_cross(const OpCall& call, Proposal& proposal) {
  const Sizes sizes = broadcast_sizes(call);
  const auto ndim = static_cast<int64_t>(sizes.size());
  const int64_t crossed = checked_dim(call, call.int_at(2), ndim);
  for (int64_t dim = 0; dim < ndim; ++dim) {
    if (dim != crossed) proposal.strategies.push_back(shard_broadcast_dim(call, sizes, dim));
  }
  add_linear(call, proposal, 0);
  add_linear(call, proposal, 1);
  proposal.output(sizes);
}

void add_solver_rules(RuleTable& table) {
  table.add("aten::cholesky_solve", matrices({{2, 2}, {{2}}, 0, like_operand<0>}));
  table.add("aten::linalg_solve_triangular", matrices({{2, 2}, {{2}}, 1, like_operand<1>}));
  table.add("aten::linalg_ldl_solve", matrices({{2, 1, 2}, {{2}}, 2}));
  table.add("aten::linalg_lu_solve", matrices({{2, 1, 2}, {{2}}, 2}));
  table.add("aten::ormqr", matrices({{2, 1, 2}, {{2}}, 2, [](const OpCall& call) {
                                       return std::vector<OutputShape>{{call.inputs[2].sizes.vec(), {}}};
                                     }}));
  table.add("aten::triangular_solve", matrices({{2, 2}, {{2}, {2}}}));
  table.add("aten::_linalg_solve_ex", propose_solve);
}

// _linalg_check_errors(info, ...): the rule proposes no strategy, so `info` is replicated. Every rank then reads the
// status of all matrices, and all ranks raise the same error. If one rank raised alone, the others would wait for it in
// the next collective.
void propose_check_errors(const OpCall&, Proposal&) {}

}  // namespace

void add_linalg_rules(RuleTable& table) {
  add_solver_rules(table);
  table.add("aten::linalg_matrix_exp", matrices({{2}, {{2}}, -1, like_first}));
  table.add({"aten::cholesky", "aten::cholesky_inverse"}, matrices({{2}, {{2}}, -1, like_first, /*raises=*/true}));
  table.add("aten::linalg_householder_product", matrices({{2, 1}, {{2}}, -1, like_first}));
  table.add("aten::geqrf", matrices({{2}, {{2}, {1}}, -1, factored}));
  table.add("aten::linalg_eig", matrices({{2}, {{1}, {2}}, -1, eigen, /*raises=*/true}));
  table.add("aten::_linalg_eigvals",
            matrices({{2},
                      {{1}},
                      -1,
                      [](const OpCall& call) { return std::vector<OutputShape>{eigen(call)[0]}; },
                      /*raises=*/true}));
  table.add("aten::linalg_pinv", matrices({{2, 0, 0}, {{2}}, -1, pseudo_inverse, /*raises=*/true}));
  table.add({"aten::linalg_cholesky_ex", "aten::linalg_inv_ex"}, matrices({{2}, {{2}, {0}}}));
  table.add("aten::_linalg_det", matrices({{2}, {{0}, {2}, {1}}}));
  table.add("aten::_linalg_slogdet", matrices({{2}, {{0}, {0}, {2}, {1}}}));
  table.add({"aten::linalg_ldl_factor_ex", "aten::linalg_lu_factor_ex"}, matrices({{2}, {{2}, {1}, {0}}}));
  table.add("aten::linalg_lu", matrices({{2}, {{2}, {2}, {2}}}));
  table.add("aten::lu_unpack", matrices({{2, 1}, {{2}, {2}, {2}}}));
  table.add("aten::linalg_qr", matrices({{2}, {{2}, {2}}}));
  table.add("aten::_linalg_svd", matrices({{2}, {{2}, {1}, {2}}, -1, nullptr, /*raises=*/true}));
  table.add("aten::_linalg_eigh", matrices({{2}, {{1}, {2}}, -1, nullptr, /*raises=*/true}));
  table.add("aten::_linalg_check_errors", propose_check_errors);
  table.add("aten::linalg_cross", propose_cross);
}

}  // namespace tessera
