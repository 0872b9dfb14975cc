#include "tessera/nn/experts/router_statistics.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/saved_value.h"
#include "tessera/nn/experts/moe.h"
#include "tessera/nn/modules_of.h"

namespace tessera::nn {
namespace {

using StatisticsPtr = std::shared_ptr<const RouterStatistics>;

// Returns `probabilities` in forward. The backward adds the gradient of the load-balance loss, which is the same vector
// for every row, to the gradient of every row that the mask selects.
struct LoadBalanceGradient : torch::autograd::Function<LoadBalanceGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& probabilities,
                            const std::optional<at::Tensor>& mask, const StatisticsPtr& statistics) {
    if (mask) ctx->save_for_backward({*mask});
    ctx->saved_data["statistics"] = make_saved_value(statistics);
    return probabilities.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto& statistics = saved_value<StatisticsPtr>(ctx->saved_data["statistics"]);
    auto added = statistics->gradient().to(grads[0].options());
    const auto masks = ctx->get_saved_variables();
    if (!masks.empty()) added = added * masks[0].to(added.scalar_type()).unsqueeze(1);
    return {grads[0] + added, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

RouterStatistics::RouterStatistics(int64_t experts, double coefficient)
    : experts_(experts), coefficient_(coefficient) {}

void RouterStatistics::begin() {
  mode_ = Mode::kCounting;
  sums_.reset();
  totals_.reset();
}

at::Tensor RouterStatistics::sums(c10::Device device) const {
  if (sums_.defined()) return sums_.to(device);
  return at::zeros({2 * experts_ + 1}, at::TensorOptions(at::kDouble).device(device));
}

void RouterStatistics::finish(const at::Tensor& sums) {
  TESSERA_CHECK(sums.dim() == 1 && sums.size(0) == 2 * experts_ + 1, ErrorKind::kShape,
                "[nn.router] found sums of {} numbers for {} experts, wanted {} numbers", sums.numel(), experts_,
                2 * experts_ + 1);
  totals_ = sums.to(at::kDouble).contiguous();
  mode_ = Mode::kFinished;
}

// Returns the number of counted rows, but at least 1: without rows all sums are 0, and the means must be 0 too.
at::Tensor RouterStatistics::rows() const {
  TESSERA_CHECK(
      totals_.defined(), ErrorKind::kInternal,
      "[nn.router] the load-balance loss of this step is not computed yet. Call finish() with the sums of all "
      "ranks after the forwards of the step and before its first backward.");
  return totals_[2 * experts_].clamp_min(1);
}

// totals_ holds the choices per expert, the sums of probabilities per expert, and the number of rows.
at::Tensor RouterStatistics::loss() const {
  const auto count = rows();
  const auto shares = totals_.narrow(0, 0, experts_) / count, means = totals_.narrow(0, experts_, experts_) / count;
  return shares.dot(means) * (coefficient_ * static_cast<double>(experts_));
}

// In the loss, the choices per expert are constants. The gradient with respect to one row's probabilities is
// coefficient * experts * choices / rows^2.
at::Tensor RouterStatistics::gradient() const {
  const auto count = rows();
  const auto scale = at::full_like(count, coefficient_ * static_cast<double>(experts_)) / (count * count);
  return (totals_.narrow(0, 0, experts_) * scale).to(at::kFloat);
}

// Counts nothing while autograd runs a backward on this thread. Such a call comes from the recomputation of a forward
// (activation checkpointing), and the first run of this forward was counted already.
void RouterStatistics::count(const at::Tensor& probabilities, const at::Tensor& chosen, const at::Tensor& mask) {
  if (mode_ != Mode::kCounting || torch::autograd::get_current_graph_task_id() != -1) return;
  const at::NoGradGuard no_grad;
  const auto wide = probabilities.options().dtype(at::kDouble);
  if (!sums_.defined()) sums_ = at::zeros({2 * experts_ + 1}, wide.requires_grad(false));
  const auto counted = mask.defined() ? mask.to(at::kDouble) : at::ones({probabilities.size(0)}, wide);
  sums_.narrow(0, 0, experts_)
      .scatter_add_(0, chosen.reshape({-1}), counted.unsqueeze(1).expand(chosen.sizes()).reshape({-1}));
  sums_.narrow(0, experts_, experts_).add_(counted.matmul(probabilities.to(at::kDouble)));
  sums_[2 * experts_].add_(counted.sum());
}

at::Tensor add_load_balance_gradient(const at::Tensor& probabilities, const at::Tensor& mask,
                                     const std::shared_ptr<const RouterStatistics>& statistics) {
  return LoadBalanceGradient::apply(probabilities, mask.defined() ? std::optional(mask) : std::nullopt, statistics);
}

std::shared_ptr<RouterStatistics> router_statistics(Module& root) {
  const auto routers = modules_of<Router>(root);
  return routers.empty() ? nullptr : routers.front().second->statistics;
}

}  // namespace tessera::nn
