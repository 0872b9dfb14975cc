#include "tessera/kernels/linear/grouped_linear.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <numeric>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/kernels/autograd/weight_grad_store.h"
#include "tessera/kernels/linear/linear.h"
#include "tessera/kernels/linear/linear_choice.h"

namespace tessera::kernels {
namespace {

struct RowGroup {
  int64_t index, begin, rows;
};

// Returns the groups that have at least one row.
std::vector<RowGroup> row_groups(const at::Tensor& counts) {
  const auto* rows = counts.const_data_ptr<int64_t>();
  std::vector<RowGroup> groups;
  for (int64_t i = 0, begin = 0; i < counts.numel(); begin += rows[i++]) {
    if (rows[i] > 0) groups.push_back({i, begin, rows[i]});
  }
  return groups;
}

// A group of at least kLargeGroup rows computes its product by product_nt(). Group sizes change in every call, and
// oneDNN takes about a millisecond to prepare each new size; for smaller groups that costs more than the faster product
// saves.
constexpr int64_t kLargeGroup = 2048;

// Writes the product of `a` and the transpose of `b` to `into`. The product belongs to one RowGroup; `rows` is the
// number of rows of that RowGroup and decides how the product is computed.
void write_product(at::Tensor into, const at::Tensor& a, const at::Tensor& b, int64_t rows) {
  if (rows < kLargeGroup && runs_in_fp32(a)) {
    into.copy_(a.to(at::kFloat).mm(b.t().to(at::kFloat)));
  } else if (rows < kLargeGroup) {
    at::mm_out(into, a, b.t());
  } else {
    into.copy_(product_nt(a, b));
  }
}

at::Tensor grouped_weight_gradient(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& counts);

struct GroupedLinear : torch::autograd::Function<GroupedLinear> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const at::Tensor& counts) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({x, weight, counts});
    const auto groups = row_groups(counts);
    auto y = at::empty({x.size(0), weight.size(1)}, x.options());
    for (const auto& group : groups) {
      write_product(y.narrow(0, group.begin, group.rows), x.narrow(0, group.begin, group.rows), weight[group.index],
                    group.rows);
    }
    return y;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    if (!grads[0].defined()) return torch::autograd::variable_list(3);
    const auto saved = ctx->get_saved_variables();
    const auto &x = saved[0], &weight = saved[1], &counts = saved[2];
    at::Tensor grad_x, grad_weight;
    if (ctx->needs_input_grad(0)) grad_x = grouped_linear(grads[0], weight.transpose(1, 2), counts);
    if (ctx->needs_input_grad(1)) {
      // In zero-bubble pipelines the WeightGradStore computes weight gradients later. A double backward needs them now,
      // because it differentiates them.
      auto* const grad_store = kernels::WeightGradStore::current_for_weights();
      if (grad_store != nullptr && !c10::GradMode::is_enabled()) {
        grad_store->add(weight, [grad = grads[0], x, counts] { return grouped_weight_gradient(grad, x, counts); });
      } else {
        grad_weight = grouped_weight_gradient(grads[0], x, counts);
      }
    }
    return {grad_x, grad_weight, at::Tensor()};
  }
};

// The gradient of the weights, [E, out, in], from grad [M, out] and x [M, in]. It is an autograd function of its own,
// so that grouped_linear has a second derivative.
struct GroupedWeightGradient : torch::autograd::Function<GroupedWeightGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& grad, const at::Tensor& x,
                            const at::Tensor& counts) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({grad, x, counts});
    const auto groups = row_groups(counts);
    const std::vector<int64_t> sizes = {counts.numel(), grad.size(1), x.size(1)};
    const bool all = static_cast<int64_t>(groups.size()) == counts.numel();
    auto out = all ? at::empty(sizes, x.options()) : at::zeros(sizes, x.options());
    for (const auto& group : groups) {
      write_product(out[group.index], grad.narrow(0, group.begin, group.rows).t(),
                    x.narrow(0, group.begin, group.rows).t(), group.rows);
    }
    return out;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    if (!grads[0].defined()) return torch::autograd::variable_list(3);
    const auto saved = ctx->get_saved_variables();
    const auto &grad = saved[0], &x = saved[1], &counts = saved[2];
    return {grouped_linear(x, grads[0], counts), grouped_linear(grad, grads[0].transpose(1, 2), counts), at::Tensor()};
  }
};

at::Tensor grouped_weight_gradient(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& counts) {
  return GroupedWeightGradient::apply(grad, x, counts);
}

}  // namespace

at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& counts) {
  TESSERA_CHECK(!is_dtensor(x) && !is_dtensor(weight), ErrorKind::kShape,
                "[kernels.grouped_linear] found a DTensor, wanted plain tensors. Pass to_local() of the experts.");
  TESSERA_CHECK(x.dim() == 2 && weight.dim() == 3 && x.size(1) == weight.size(2), ErrorKind::kShape,
                "[kernels.grouped_linear] found x of {} dims and a weight of {} dims, wanted [M, in] and [E, out, in]",
                x.dim(), weight.dim());
  TESSERA_CHECK(
      counts.is_cpu() && counts.scalar_type() == at::kLong && counts.dim() == 1 && counts.size(0) == weight.size(0),
      ErrorKind::kShape,
      "[kernels.grouped_linear] counts: found {} elements of {} on {}, wanted {} elements of int64 on the CPU",
      counts.numel(), c10::toString(counts.scalar_type()), counts.device().str(), weight.size(0));
  const auto rows = counts.contiguous();
  const auto* first = rows.const_data_ptr<int64_t>();
  const bool positive = std::all_of(first, first + rows.numel(), [](int64_t count) { return count >= 0; });
  TESSERA_CHECK(positive && std::accumulate(first, first + rows.numel(), int64_t{0}) == x.size(0), ErrorKind::kShape,
                "[kernels.grouped_linear] counts: found values that are negative or do not add up to the {} rows of x",
                x.size(0));
  return GroupedLinear::apply(x, weight, rows);
}

}  // namespace tessera::kernels
