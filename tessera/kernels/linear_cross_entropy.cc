#include "tessera/kernels/linear_cross_entropy.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/kernels/linear.h"

namespace tessera {
namespace {

constexpr int64_t kWeightBlockRows = 8192;  // rows of the head whose gradient is added up at a time

struct Sums {
  at::Tensor loss;         // fp64 scalar
  at::Tensor grad_hidden;  // of the rows given; undefined where not wanted
  at::Tensor grad_weight;  // fp32
};

// Adds g^T h, block by block of the head's rows so that no second tensor of the head's size is needed.
void add_weight_gradient(Sums& sums, const at::Tensor& g, const at::Tensor& h) {
  const int64_t vocabulary = g.size(1);
  for (int64_t begin = 0; begin < vocabulary; begin += kWeightBlockRows) {
    const int64_t rows = std::min(kWeightBlockRows, vocabulary - begin);
    sums.grad_weight.narrow(0, begin, rows).add_(product_nt(g.narrow(1, begin, rows).t(), h.t()));
  }
}

void add_chunk(Sums& sums, const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels, int64_t begin,
               int64_t rows) {
  const auto h = hidden.narrow(0, begin, rows);
  const auto target = labels.narrow(0, begin, rows).unsqueeze(1);
  auto logits = product_nt(h, weight).to(at::kFloat);
  const auto normaliser = at::logsumexp(logits, 1, true);
  sums.loss.add_((normaliser - logits.gather(1, target)).sum(at::kDouble));
  if (!sums.grad_hidden.defined() && !sums.grad_weight.defined()) return;
  // softmax - onehot, in place of the logits
  auto g = logits.sub_(normaliser).exp_();
  g.scatter_add_(1, target, at::full({1, 1}, -1.0, g.options()).expand({rows, 1}));
  if (sums.grad_hidden.defined()) {
    sums.grad_hidden.narrow(0, begin, rows).copy_(product_nt(g.to(weight.scalar_type()), weight.t()));
  }
  if (sums.grad_weight.defined()) add_weight_gradient(sums, g, h.to(at::kFloat));
}

Sums sum_chunks(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels, bool wants_hidden,
                bool wants_weight, int64_t chunk_bytes) {
  Sums sums{at::zeros({}, hidden.options().dtype(at::kDouble)), {}, {}};
  if (wants_hidden) sums.grad_hidden = at::empty_like(hidden);
  if (wants_weight) sums.grad_weight = at::zeros(weight.sizes(), weight.options().dtype(at::kFloat));
  const int64_t count = labels.size(0);
  const int64_t row_bytes = std::max<int64_t>(1, weight.size(0)) * static_cast<int64_t>(sizeof(float));
  const int64_t most = std::clamp<int64_t>(chunk_bytes / row_bytes, 1, std::max<int64_t>(1, count));
  const int64_t chunks = (count + most - 1) / most;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {  // of nearly equal size: a small rest would waste a whole product
    const int64_t begin = count * chunk / chunks, end = count * (chunk + 1) / chunks;
    add_chunk(sums, hidden, weight, labels, begin, end - begin);
  }
  return sums;
}

// `gradient` times `factor`: in its own memory when nobody can ask for it again.
at::Tensor scaled(const at::Tensor& gradient, const at::Tensor& factor, bool keep) {
  if (!gradient.defined()) return {};
  const auto converted = factor.to(gradient.scalar_type());
  return keep ? gradient * converted : gradient.mul_(converted);
}

struct LinearCrossEntropy : torch::autograd::Function<LinearCrossEntropy> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& hidden, const at::Tensor& weight,
                            const at::Tensor& labels, bool wants_hidden, bool wants_weight, int64_t chunk_bytes) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto kept = at::nonzero(labels.ne(kIgnoredLabel)).squeeze(1);
    const bool all = kept.size(0) == labels.size(0);
    auto sums = sum_chunks(all ? hidden : hidden.index_select(0, kept), weight, all ? labels : labels.index_select(0, kept),
                           wants_hidden, wants_weight, chunk_bytes);
    if (wants_hidden && !all) {
      sums.grad_hidden = at::zeros_like(hidden).index_copy_(0, kept, sums.grad_hidden);
    }
    if (wants_weight) sums.grad_weight = sums.grad_weight.to(weight.scalar_type());
    // Results of our own, which FSDP never frees: kept outside save_for_backward so that backward can give them away.
    ctx->saved_data["grad_hidden"] = sums.grad_hidden;
    ctx->saved_data["grad_weight"] = sums.grad_weight;
    return sums.loss.to(at::kFloat);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const bool keep = torch::autograd::get_current_graph_task_keep_graph();
    TESSERA_CHECK(ctx->saved_data.count("grad_hidden"), ErrorKind::kInternal,
                  "[kernels.linear_cross_entropy] backward a second time. Set retain_graph in the first.");
    const at::Tensor grad_hidden = ctx->saved_data["grad_hidden"].toTensor();
    const at::Tensor grad_weight = ctx->saved_data["grad_weight"].toTensor();
    if (!keep) ctx->saved_data.clear();
    const at::Tensor none;
    return {scaled(grad_hidden, grads[0], keep), scaled(grad_weight, grads[0], keep), none, none, none, none};
  }
};

void check_arguments(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels) {
  TESSERA_CHECK(hidden.dim() == 2 && weight.dim() == 2 && labels.dim() == 1 && hidden.size(1) == weight.size(1) &&
                    labels.size(0) == hidden.size(0) && labels.scalar_type() == at::kLong,
                ErrorKind::kShape,
                "[kernels.linear_cross_entropy] found {}-d hidden, {}-d weight, {} labels of {}: wanted [N, d], [V, d] and "
                "N int64 labels",
                hidden.dim(), weight.dim(), labels.numel(), c10::toString(labels.scalar_type()));
  if (labels.numel() == 0) return;
  const auto wrong = labels.ne(kIgnoredLabel).logical_and(labels.lt(0).logical_or(labels.ge(weight.size(0))));
  if (wrong.any().item<bool>()) [[unlikely]] {
    const int64_t at = wrong.nonzero()[0].item<int64_t>();
    raise(ErrorKind::kShape, "[kernels.linear_cross_entropy] label {}: found {}, wanted one of the {} classes or {}", at,
          labels[at].item<int64_t>(), weight.size(0), kIgnoredLabel);
  }
}

}  // namespace

at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                                const LinearCrossEntropyOptions& options) {
  if (is_dtensor(hidden) || is_dtensor(weight) || is_dtensor(labels)) {
    return at::cross_entropy_loss(at::linear(hidden, weight).to(at::kFloat), labels, {}, at::Reduction::Sum, kIgnoredLabel);
  }
  check_arguments(hidden, weight, labels);
  const bool grad = at::GradMode::is_enabled();
  return LinearCrossEntropy::apply(hidden, weight, labels, grad && hidden.requires_grad(), grad && weight.requires_grad(),
                                   options.chunk_bytes);
}

}  // namespace tessera
