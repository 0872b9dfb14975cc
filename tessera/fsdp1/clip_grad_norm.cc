#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/fsdp1/fully_sharded_data_parallel.h"
#include "tessera/optim/power_sum.h"

namespace tessera {
namespace {

using optim::PowerSum;

// Returns the p-norm of a vector. `norms` has the p-norms of the disjoint parts of the vector.
double norm_of_norms(const std::vector<double>& norms, double p) {
  return optim::norm_of_sums(p, [&](const PowerSum& power) {
    double sum = 0;
    for (const double norm : norms) sum = power.add(sum, power.term(norm));
    return sum;
  });
}

// Returns the norm over all ranks of the group. The norms are added in rank order, so every rank gets the same bits.
// COLLECTIVE over the group.
double norm_over_ranks(comm::Group& group, double own, double p) {
  if (group.size() == 1) return own;
  at::Tensor all = at::empty({group.size()}, at::kDouble);
  comm::all_gather_into(group, all, at::full({1}, own, at::kDouble), "gradient norm").wait();
  const double* values = all.const_data_ptr<double>();
  return norm_of_norms({values, values + group.size()}, p);
}

// The gradients that are sharded over the ranks of one group.
struct ShardedGradients {
  std::shared_ptr<comm::Group> group;  // null: every rank has these gradients whole
  std::vector<at::Tensor> gradients;
};

}  // namespace

double clip_grad_norm_(nn::Module& root, double max_norm, double norm_type) {
  TESSERA_CHECK(norm_type > 0, ErrorKind::kConfig,
                "[fsdp1.clip_grad_norm] norm type: found {}, wanted a positive number or infinity", norm_type);
  const auto handles = flat_parameter_handles(root);
  TESSERA_CHECK(
      !handles.empty(), ErrorKind::kShape,
      "[fsdp1.clip_grad_norm] no module here is wrapped. Call wrap_fsdp1 first, or take optim::clip_grad_norm.");
  const c10::NoGradGuard no_grad;
  // Each entry of `kinds` has the gradients that are sharded over one process group; kinds[0] has the gradients that
  // every rank has whole. The norm of an entry is reduced over the group of the entry only, so a whole gradient is not
  // counted once per rank. `counted` has the tensors that were added already, because root.parameters() lists the
  // parameters of the units again.
  std::vector<ShardedGradients> kinds(1);
  std::unordered_set<const c10::TensorImpl*> counted;
  const auto count = [&](const at::Tensor& parameter, ShardedGradients& kind) {
    const auto& gradient = parameter.grad();
    if (!counted.insert(parameter.unsafeGetTensorImpl()).second || !gradient.defined() || gradient.numel() == 0) return;
    kind.gradients.push_back(gradient);
  };
  for (const auto& handle : handles) {
    size_t kind = 0;
    if (handle->sharding_strategy() != ShardingStrategy::kNoShard) {
      for (kind = 1; kind < kinds.size() && kinds[kind].group->ranks() != handle->group()->ranks();) ++kind;
      if (kind == kinds.size()) kinds.push_back({handle->group(), {}});
    }
    for (const auto& parameter : handle->parameters()) count(parameter, kinds[kind]);
  }
  for (const auto& parameter : root.parameters()) count(parameter, kinds.front());  // parameters outside units
  std::vector<at::Tensor> gradients;
  std::vector<double> parts;
  for (const auto& kind : kinds) {
    gradients.insert(gradients.end(), kind.gradients.begin(), kind.gradients.end());
    const double own = optim::norm_of_sums(norm_type, [&](const PowerSum& power) { return power.of(kind.gradients); });
    parts.push_back(kind.group ? norm_over_ranks(*kind.group, own, norm_type) : own);
  }
  const double total = norm_of_norms(parts, norm_type);
  const double factor = max_norm / (total + 1e-6);
  // `!(factor >= 1)` is also true when `factor` is NaN, so a NaN norm makes the gradients NaN.
  if (!(factor >= 1) && !gradients.empty()) at::_foreach_mul_(gradients, factor);
  return total;
}

}  // namespace tessera
