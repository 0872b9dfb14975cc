#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/stack.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <unordered_map>
#include <unordered_set>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/fsdp1/fully_sharded_data_parallel.h"

namespace tessera {
namespace {

// The norm of a vector whose parts have these norms; in powers of the largest, so that none leaves float64.
double norm_of_norms(const std::vector<double>& norms, double p) {
  double largest = 0;
  for (double norm : norms) {
    if (std::isnan(norm)) return norm;
    largest = std::max(largest, norm);
  }
  if (std::isinf(p) || std::isinf(largest) || largest == 0) return largest;
  double sum = 0;
  for (double norm : norms) sum += std::pow(norm / largest, p);
  return largest * std::pow(sum, 1 / p);
}

// Lists of one device each, in the order in which they come: what libtorch has one kernel for.
std::vector<std::vector<at::Tensor>> by_device(const std::vector<at::Tensor>& tensors) {
  std::vector<std::vector<at::Tensor>> lists;
  for (const auto& tensor : tensors) {
    auto at = std::ranges::find_if(lists, [&](const auto& list) { return list.front().device() == tensor.device(); });
    if (at == lists.end()) at = lists.insert(at, std::vector<at::Tensor>());
    at->push_back(tensor);
  }
  return lists;
}

// Of each, in float64: one wait of the host a device, however many there are.
std::vector<double> plain_norms(const std::vector<at::Tensor>& gradients, double p) {
  std::unordered_map<const c10::TensorImpl*, double> found;
  for (const auto& list : by_device(gradients)) {
    const at::Tensor norms = at::stack(at::_foreach_norm(list, p, at::kDouble)).cpu();
    for (size_t i = 0; i < list.size(); ++i) found[list[i].unsafeGetTensorImpl()] = norms.const_data_ptr<double>()[i];
  }
  std::vector<double> out;
  for (const auto& gradient : gradients) out.push_back(found.at(gradient.unsafeGetTensorImpl()));
  return out;
}

// The same where powers of their elements leave float64.
std::vector<double> norms_of(const std::vector<at::Tensor>& gradients, double p) {
  std::vector<double> norms = plain_norms(gradients, p);
  std::vector<size_t> beyond;
  for (size_t i = 0; i < norms.size(); ++i) {
    if (norms[i] <= 1e-290 || std::isinf(norms[i])) beyond.push_back(i);
  }
  std::vector<at::Tensor> those;
  for (const size_t i : beyond) those.push_back(gradients[i]);
  const std::vector<double> largest = plain_norms(those, INFINITY);
  for (size_t i = 0; i < beyond.size(); ++i) {
    double& norm = norms[beyond[i]];
    norm = largest[i];
    if (!std::isfinite(largest[i]) || largest[i] == 0) continue;
    norm *= plain_norms({those[i].to(at::kDouble) / largest[i]}, p).front();
  }
  return norms;
}

// Over all ranks of the group, taken in their order. COLLECTIVE.
double norm_over_ranks(comm::Group& group, double own, double p) {
  if (group.size() == 1) return own;
  at::Tensor all = at::empty({group.size()}, at::kDouble);
  comm::all_gather_into(group, all, at::full({1}, own, at::kDouble), "gradient norm").wait();
  const double* values = all.const_data_ptr<double>();
  return norm_of_norms({values, values + group.size()}, p);
}

// Gradients by the ranks that their shards lie on.
struct ShardedGradients {
  std::shared_ptr<comm::Group> group;  // null: every rank has them whole
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
  for (const auto& parameter : root.parameters()) count(parameter, kinds.front());  // of no unit
  std::vector<at::Tensor> gradients;
  for (const auto& kind : kinds) gradients.insert(gradients.end(), kind.gradients.begin(), kind.gradients.end());
  const std::vector<double> norms = norms_of(gradients, norm_type);
  auto next = norms.begin();
  std::vector<double> parts;
  for (const auto& kind : kinds) {
    const auto end = next + static_cast<std::ptrdiff_t>(kind.gradients.size());
    const double own = norm_of_norms({next, end}, norm_type);
    parts.push_back(kind.group ? norm_over_ranks(*kind.group, own, norm_type) : own);
    next = end;
  }
  const double total = norm_of_norms(parts, norm_type);
  const double factor = max_norm / (total + 1e-6);
  if (!(factor >= 1)) {
    for (const auto& list : by_device(gradients)) at::_foreach_mul_(list, factor);
  }
  return total;
}

}  // namespace tessera
