#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/parallel/fsdp1/fully_sharded_data_parallel.h"

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

double norm_of_gradient(const at::Tensor& gradient, double p) {
  if (gradient.numel() == 0) return 0;
  const auto norm = [](const at::Tensor& of, double order) {
    return at::linalg_vector_norm(of, order, {}, false, at::kDouble).item<double>();
  };
  const double plain = norm(gradient, p);
  if (std::isnan(plain) || (plain > 1e-290 && !std::isinf(plain))) return plain;
  const double largest = norm(gradient, INFINITY);
  if (!std::isfinite(largest) || largest == 0) return largest;
  return largest * norm(gradient.to(at::kDouble) / largest, p);
}

// Over all ranks of the group, taken in their order. COLLECTIVE.
double norm_over_ranks(comm::Group& group, c10::Device device, double own, double p) {
  if (group.size() == 1) return own;
  const at::Tensor sent = at::empty({1}, at::kDouble).fill_(own).to(device);
  at::Tensor all = at::empty({group.size()}, sent.options());
  comm::all_gather_into(group, all, sent, "gradient norm").wait();
  all = all.to(at::kCPU);
  const double* values = all.const_data_ptr<double>();
  return norm_of_norms({values, values + group.size()}, p);
}

// Gradients by the ranks that their shards lie on.
struct ShardNorms {
  std::shared_ptr<comm::Group> group;
  c10::Device device;
  std::vector<double> norms;
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
  std::vector<at::Tensor> gradients;
  std::vector<double> norms;  // of what every rank has whole
  std::vector<ShardNorms> sharded;
  std::unordered_set<const c10::TensorImpl*> counted;
  const auto count = [&](const at::Tensor& parameter, std::vector<double>& into) {
    if (!counted.insert(parameter.unsafeGetTensorImpl()).second || !parameter.grad().defined()) return;
    gradients.push_back(parameter.grad());
    into.push_back(norm_of_gradient(parameter.grad(), norm_type));
  };
  for (const auto& handle : handles) {
    std::vector<double>* into = &norms;
    if (handle->sharding_strategy() != ShardingStrategy::kNoShard) {
      auto at = std::find_if(sharded.begin(), sharded.end(),
                             [&](const auto& each) { return each.group->ranks() == handle->group()->ranks(); });
      if (at == sharded.end()) at = sharded.insert(at, {handle->group(), handle->shard().device(), {}});
      into = &at->norms;
    }
    for (const auto& parameter : handle->parameters()) count(parameter, *into);
  }
  for (const auto& parameter : root.parameters()) count(parameter, norms);  // of no unit
  for (const auto& each : sharded) {
    norms.push_back(norm_over_ranks(*each.group, each.device, norm_of_norms(each.norms, norm_type), norm_type));
  }
  const double total = norm_of_norms(norms, norm_type);
  const double factor = max_norm / (total + 1e-6);
  if (!(factor >= 1)) {
    for (const auto& gradient : gradients) gradient.mul_(factor);
  }
  return total;
}

}  // namespace tessera
