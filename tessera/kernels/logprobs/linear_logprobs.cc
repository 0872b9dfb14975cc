#include "tessera/kernels/logprobs/linear_logprobs.h"

#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/base/ignored_label.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/dtensor/tensor/saved_value.h"
#include "tessera/kernels/dispatch/result_form.h"
#include "tessera/kernels/linear/linear.h"
#include "tessera/kernels/logprobs/detail/local_columns.h"
#include "tessera/kernels/logprobs/detail/softmax_sums.h"
#include "tessera/kernels/loss/head_chunks.h"

namespace tessera::kernels {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kLinearVerb = "linear_logprobs";

// The rows of one call whose target is not kIgnoredLabel, and the head's weight for this rank's part of the vocabulary.
struct HeadRows {
  LabelledRows labelled;
  at::Tensor weight, hidden;
  at::Tensor ids;  // [rows, 1]
  LinearLogprobOptions options;
  at::ScalarType wide;

  HeadRows(const at::Tensor& all_hidden, const at::Tensor& head, const at::Tensor& target,
           const LinearLogprobOptions& logprob_options)
      : labelled(target.reshape({target.numel()})),
        weight(head.detach()),
        hidden(labelled.of(all_hidden.detach().reshape({target.numel(), all_hidden.size(-1)}))),
        ids(labelled.of(target.reshape({target.numel()})).unsqueeze(1)),
        options(logprob_options),
        wide(wide_type(all_hidden.scalar_type())) {}

  // Computes the logits of chunks of rows, with options.softcap applied, and calls visit(first row, logits of the
  // chunk, derivative of the softcap) for each chunk. The derivative is an undefined tensor if the softcap is 0 or
  // `backward` is false.
  template <class Visit>
  void for_chunks(bool backward, Visit visit) const {
    const int64_t tensors = backward && options.softcap > 0 ? 2 : 1;
    const int64_t row_bytes =
        std::max<int64_t>(1, weight.size(0)) * static_cast<int64_t>(c10::elementSize(wide)) * tensors;
    for (const auto& chunk : row_chunks(ids.size(0), row_bytes, options.chunk_bytes)) {
      auto logits = product_nt(hidden.narrow(0, chunk.begin, chunk.rows), weight).to(wide);
      const auto slope = cap_logits(logits, options.softcap, backward);
      visit(chunk.begin, logits, slope);
    }
  }
};

struct LinearForward {
  at::Tensor logprobs;       // float64, of all rows, ignored ones too
  detail::SoftmaxSums sums;  // of the rows that are not ignored
};

// Computes the log-prob of each row's target. All-gathers four numbers per row over part.group: the maximum of the
// logits of this rank's columns, the sum of exp(logit - maximum) over these columns, the target's logit, and a 1. The
// last two are 0 where this rank does not have the target's column. COLLECTIVE over part.group.
LinearForward linear_forward(const HeadRows& head, const VocabShard& part) {
  const detail::LocalColumns local_columns(head.ids, part);
  auto own = at::zeros({head.ids.size(0), 4}, head.hidden.options().dtype(at::kDouble));  // max, sum, target, found
  own.select(1, 0).fill_(-std::numeric_limits<double>::infinity());
  if (part.end > part.start) {
    head.for_chunks(false, [&](int64_t begin, const at::Tensor& logits, const at::Tensor&) {
      const auto mine = own.narrow(0, begin, logits.size(0));
      const auto sums = detail::softmax_sums(detail::LogitRows(logits));
      mine.select(1, 0).copy_(sums.maximum);
      mine.select(1, 1).copy_(sums.sum);
      mine.narrow(1, 2, 1).copy_(logits.gather(1, local_columns.column.narrow(0, begin, logits.size(0))));
    });
    own.narrow(1, 2, 1).masked_fill_(local_columns.is_local.logical_not(), 0);
    own.narrow(1, 3, 1).copy_(local_columns.is_local);
  }
  const auto all = detail::all_gather_shards(part, own);
  detail::check_owned_once(kLinearVerb, head.ids, all.narrow(2, 3, 1).sum(0), part);
  const auto sums = detail::merge_softmax_sums(all.select(2, 0), all.select(2, 1)).all;
  const auto logprobs = all.select(2, 2).sum(0).sub_(sums.maximum).sub_(sums.sum.log());
  return {head.labelled.to_all(logprobs), sums};
}

struct LinearGradients {
  at::Tensor hidden, weight;
};

// Returns the gradients of the hidden states and of the weight, from the rows that are not ignored. The logits of each
// chunk are computed again and overwritten by their gradient, (onehot - softmax) g (with a softcap, times the
// derivative of the softcap), where g is the gradient of the row's log-prob. The gradient of the hidden states is the
// product of the logits' gradient with the weight; the gradient of the weight is its product with the hidden states. If
// wants_hidden is true, the gradient of the hidden states is summed over the ranks of part.group, each of which has
// other columns of the vocabulary: COLLECTIVE over part.group.
LinearGradients linear_backward(const HeadRows& head, const at::Tensor& weight, const at::Tensor& grad,
                                const detail::SoftmaxSums& sums, const VocabShard& part, bool wants_hidden,
                                bool wants_weight) {
  LinearGradients out;
  if (wants_hidden) out.hidden = at::zeros_like(head.hidden);
  if (wants_weight) out.weight = at::zeros(weight.sizes(), weight.options().dtype(head.wide));
  const detail::LocalColumns local_columns(head.ids, part);
  const auto g = head.labelled.of(grad.reshape({grad.numel()})).unsqueeze(1).to(head.wide);
  const auto own_g = g * local_columns.is_local;
  const auto factor = g.neg().div_(sums.sum.unsqueeze(1).to(head.wide));
  const auto maximum = detail::finite_max(sums.maximum).unsqueeze(1).to(head.wide);
  if (part.end > part.start) {
    head.for_chunks(true, [&](int64_t begin, at::Tensor& logits, const at::Tensor& slope) {
      const int64_t rows = logits.size(0);
      const auto part_of = [&](const at::Tensor& each) { return each.narrow(0, begin, rows); };
      // With x the logits, M the maximum of a row and S its sum of exp(x - M), both over all ranks: the gradient of the
      // logits, (onehot - softmax) g, is exp(x - M) (-g / S), plus g at the target.
      logits.sub_(part_of(maximum)).exp_().mul_(part_of(factor));
      logits.scatter_add_(1, part_of(local_columns.column), part_of(own_g));
      if (slope.defined()) logits.mul_(slope);
      if (wants_hidden) part_of(out.hidden).copy_(product_nt(logits.to(weight.scalar_type()), weight.t()));
      if (wants_weight) add_head_gradient(out.weight, logits, part_of(head.hidden).to(head.wide));
    });
  }
  if (wants_hidden && part.size() > 1 && out.hidden.numel() > 0) {
    comm::all_reduce(*part.group, out.hidden, comm::ReduceOp::kSum, kLinearVerb).wait();
  }
  if (wants_weight) out.weight = out.weight.to(weight.scalar_type());
  return out;
}

struct LinearLogprobsFunction : torch::autograd::Function<LinearLogprobsFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& hidden, const at::Tensor& weight,
                            const at::Tensor& target, const VocabShard& part, const LinearLogprobOptions& options) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const HeadRows head(hidden, weight, target, options);
    const auto found = linear_forward(head, part);
    ctx->save_for_backward({hidden, weight, target, found.sums.maximum, found.sums.sum});
    ctx->saved_data["part"] = make_saved_value(part);
    ctx->saved_data["options"] = make_saved_value(options);
    return found.logprobs.to(head.wide).view(target.sizes());
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    detail::refuse_second_derivative(kLinearVerb);
    const auto saved = ctx->get_saved_variables();
    auto& data = ctx->saved_data;
    const VocabShard part = saved_value<VocabShard>(data["part"]);
    const HeadRows head(saved[0], saved[1], saved[2], saved_value<LinearLogprobOptions>(data["options"]));
    auto found = linear_backward(head, saved[1].detach(), grads[0], {saved[3], saved[4]}, part,
                                 ctx->needs_input_grad(0), ctx->needs_input_grad(1));
    if (found.hidden.defined()) found.hidden = head.labelled.to_all(found.hidden).view(saved[0].sizes());
    const at::Tensor none;
    return {found.hidden, found.weight, none, none, none};
  }
};

void check_linear(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target) {
  const bool fits = hidden.dim() >= 1 && weight.dim() == 2 && hidden.size(-1) == weight.size(1);
  TESSERA_CHECK(fits, ErrorKind::kShape, "[kernels.{}] found hidden {} and weight {}: wanted [..., d] and [V, d]",
                kLinearVerb, c10::str(hidden.sizes()), c10::str(weight.sizes()));
  detail::check_ids(kLinearVerb, hidden, target, false);
}

// ---- DTensors ----

struct HeadLayout {
  Placements hidden, weight, weight_gradient, rows;
  int64_t class_dim = -1;  // mesh dim
};

// Decides for each mesh dim what it shards: the classes (the first mesh dim that shards weight's rows), the rows of
// hidden, or nothing. Where rows are sharded, each rank's gradient of the weight covers only its rows and is Partial.
HeadLayout layout_of_head(const at::Tensor& hidden, const at::Tensor& weight) {
  HeadLayout layout;
  const int64_t leading = hidden.dim() - 1;
  for (size_t m = 0; m < placements(hidden).size(); ++m) {
    const auto &of_hidden = placements(hidden)[m], &of_weight = placements(weight)[m];
    const bool classes = of_weight.is_shard(0) && layout.class_dim < 0;
    const bool rows = !classes && of_hidden.is_shard() && of_hidden.dim < leading;
    if (classes) layout.class_dim = static_cast<int64_t>(m);
    layout.hidden.push_back(rows ? of_hidden : Replicate());
    layout.rows.push_back(layout.hidden.back());
    layout.weight.push_back(classes ? Shard(0) : Replicate());
    layout.weight_gradient.push_back(classes ? Shard(0) : rows ? Partial() : Replicate());
  }
  return layout;
}

at::Tensor linear_logprobs_of_mesh(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
                                   const LinearLogprobOptions& options) {
  TESSERA_CHECK(is_dtensor(hidden) && is_dtensor(weight) && *device_mesh(hidden) == *device_mesh(weight),
                ErrorKind::kShape,
                "[kernels.{}] found hidden states or head as a plain tensor or on another mesh, wanted both as "
                "DTensors on the same mesh, or both plain. Distribute the plain tensor.",
                kLinearVerb);
  const MeshPtr mesh = device_mesh(hidden);
  const auto layout = layout_of_head(hidden, weight);
  // Every rank has all targets, so a wrong one is an error on all ranks before the collectives of the forward.
  const auto ids = is_dtensor(target) ? full_tensor(target) : target;
  const int64_t wrong = first_wrong_label(ids, weight.size(0));
  TESSERA_CHECK(wrong < 0, ErrorKind::kShape, "[kernels.{}] target {}: found id {}, wanted one of the {} ids, or {}",
                kLinearVerb, wrong, ids.flatten()[wrong].item<int64_t>(), weight.size(0), kIgnoredLabel);
  const auto own = LinearLogprobsFunction::apply(to_local(redistribute(hidden, layout.hidden)),
                                                 to_local(redistribute(weight, layout.weight), layout.weight_gradient),
                                                 to_local(distribute_tensor(ids, mesh, layout.rows, std::nullopt)),
                                                 vocab_shard_of(*mesh, layout.class_dim, weight.size(0)), options);
  return from_local(own, mesh, layout.rows, FromLocalOptions::contiguous(target.sizes().vec()));
}

}  // namespace

at::Tensor linear_logprobs(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
                           const LinearLogprobOptions& options) {
  check_linear(hidden, weight, target);
  if (is_dtensor(hidden) || is_dtensor(weight)) return linear_logprobs_of_mesh(hidden, weight, target, options);
  return LinearLogprobsFunction::apply(hidden, weight, target, VocabShard{.start = 0, .end = weight.size(0)}, options);
}

at::Tensor linear_logprobs(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
                           const VocabShard& part, const LinearLogprobOptions& options) {
  check_linear(hidden, weight, target);
  TESSERA_CHECK(
      !is_dtensor(hidden) && !is_dtensor(weight) && part.start >= 0 && part.end - part.start == weight.size(0),
      ErrorKind::kShape,
      "[kernels.{}] found a head of {} rows for the vocabulary part [{}, {}), wanted one row per id of the part, and "
      "plain tensors",
      kLinearVerb, weight.size(0), part.start, part.end);
  return LinearLogprobsFunction::apply(hidden, weight, target, part, options);
}

at::Tensor from_parallel_hidden_states_to_logprobs(const at::Tensor& hidden, const at::Tensor& weight,
                                                   const at::Tensor& input_ids, const LinearLogprobOptions& options) {
  TESSERA_CHECK(hidden.dim() == 3 && input_ids.dim() == 2 && input_ids.size(1) > 0, ErrorKind::kShape,
                "[kernels.from_parallel_hidden_states_to_logprobs] found hidden {} and ids {}: wanted [B, S, d] and "
                "[B, S]",
                c10::str(hidden.sizes()), c10::str(input_ids.sizes()));
  const auto ids = is_dtensor(input_ids) ? full_tensor(input_ids) : input_ids;
  const auto logprobs = linear_logprobs(hidden, weight, detail::next_token_ids(ids), options);
  // Plain ids give a plain, whole result. The last position has no next token and is cut off.
  const bool whole = is_dtensor(logprobs) && !is_dtensor(input_ids);
  return (whole ? full_tensor(logprobs) : logprobs).narrow(1, 0, ids.size(1) - 1);
}

}  // namespace tessera::kernels
