#include "tessera/kernels/loss/cross_entropy_sums.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "tessera/base/ignored_label.h"
#include "tessera/kernels/dispatch/result_form.h"
#include "tessera/kernels/linear/linear.h"
#include "tessera/kernels/loss/head_chunks.h"
#include "tessera/kernels/rows/elementwise_kernels.h"

namespace tessera::kernels {
namespace {

// The number of labelled rows changes in each step, and oneDNN compiles code for each new shape (2 MB of address space,
// 2 ms). Padding with rows of zeros keeps the number of shapes small.
int64_t rows_to_fill(int64_t rows) {
  constexpr int64_t kMultiple = 16;
  return (kMultiple - rows % kMultiple) % kMultiple;
}

// The rows of one call and their running sums. A chunk runs in one of three ways:
// 1. by_rows_: Tessera's own loops, for fp32 logits of all classes without a softcap;
// 2. factor_ is defined: ATen's fused log_softmax, for all classes on an accelerator without such loops;
// 3. otherwise: plain operations, for a part of the classes (maxima and sums are all-reduced) or a softcap.
class CrossEntropyAccumulator {
 public:
  CrossEntropyAccumulator(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                          const ClassShard& part, const CrossEntropyRequest& request)
      : hidden_(hidden),
        weight_(weight),
        labels_(labels),
        part_(part),
        wide_(wide_type(hidden.scalar_type())),
        softcap_(request.softcap),
        by_rows_(part.shard_groups.empty() && softcap_ <= 0 && wide_ == at::kFloat && weight.size(0) > 0 &&
                 labels.device() == hidden.device() && has_elementwise_kernels(hidden.device(), wide_)) {
    // On an accelerator the host must not read labels, so ignored rows are computed like all others; on the CPU the
    // caller has removed them.
    if (!labels.is_cpu()) read_on_device();
    loss_ = at::zeros({}, hidden.options().dtype(at::kDouble));
    if (request.hidden_gradient) grad_hidden_ = at::empty_like(hidden);
    if (request.weight_gradient) grad_weight_ = at::zeros(weight.sizes(), weight.options().dtype(wide_));
  }

  CrossEntropySums run(int64_t chunk_bytes) {
    const int64_t count = labels_.size(0);
    // The number of tensors of a chunk's size that are in memory at once. One tensor holds the logits. With a softcap
    // there is a second tensor, the derivative of the softcap; if factor_ is defined, the second tensor holds the
    // log-probs.
    const int64_t tensors = softcap_ > 0 || factor_.defined() ? 2 : 1;
    const int64_t row_bytes =
        std::max<int64_t>(1, part_.max_classes) * static_cast<int64_t>(c10::elementSize(wide_)) * tensors;
    for (const auto& chunk : row_chunks(count, row_bytes, chunk_bytes)) add_chunk(chunk.begin, chunk.rows);
    if (grad_hidden_.defined()) all_reduce_shards(grad_hidden_, comm::ReduceOp::kSum);
    return {loss_.to(wide_), grad_hidden_, grad_weight_};
  }

 private:
  // Computes on the device the tensors that depend on labels: ignored_, target_, factor_ and minus_. factor_ is NaN for
  // a label that is no class.
  void read_on_device() {
    ignored_ = labels_.eq(kIgnoredLabel).unsqueeze(1);
    if (by_rows_ || !part_.shard_groups.empty() || softcap_ > 0 || weight_.size(0) == 0) return;
    const auto classes = labels_.unsqueeze(1);
    target_ = classes.clamp(0, weight_.size(0) - 1);
    factor_ = at::ones(target_.sizes(), hidden_.options().dtype(wide_));
    factor_.masked_fill_(target_.ne(classes), std::numeric_limits<double>::quiet_NaN()).masked_fill_(ignored_, 0);
    minus_ = factor_.neg();
  }

  // Adds the loss of a chunk to loss_, and adds the chunk's gradients, with ATen's log_softmax. add_chunk() calls this
  // function if factor_ is defined: this rank has all classes, there is no softcap, and the labels are on an
  // accelerator but Tessera's loops do not support the device or the dtype.
  void add_whole_rows(int64_t begin, const at::Tensor& h, at::Tensor logits) {
    const auto of_rows = [&](const at::Tensor& all) { return all.narrow(0, begin, h.size(0)); };
    const auto logprobs = at::_log_softmax(logits, 1, /*half_to_float=*/false);
    logits.reset();
    loss_.sub_(logprobs.gather(1, of_rows(target_)).mul_(of_rows(factor_)).sum(at::kDouble));
    if (!wants_gradient()) return;
    // `g` is the gradient of the chunk's logits, (softmax - onehot) * factor_. It overwrites the log-probs.
    const auto g = logprobs.exp_().scatter_add_(1, of_rows(target_), of_rows(minus_)).mul_(of_rows(factor_));
    add_gradients(begin, h.size(0), h, g);
  }

  void all_reduce_shards(const at::Tensor& values, comm::ReduceOp op) const {
    for (auto* group : part_.shard_groups) comm::all_reduce(*group, values, op, "linear_cross_entropy").wait();
  }

  // Subtracts from each row its maximum over all classes of all ranks.
  void subtract_row_max(at::Tensor& logits) const {
    const auto least = -std::numeric_limits<double>::infinity();
    const auto maximum =
        logits.size(1) > 0 ? logits.amax(1, true) : at::full({logits.size(0), 1}, least, logits.options());
    all_reduce_shards(maximum, comm::ReduceOp::kMax);
    logits.sub_(maximum);
  }

  bool wants_gradient() const { return grad_hidden_.defined() || grad_weight_.defined(); }

  // Writes the gradients of the hidden states' rows [begin, begin + rows) to grad_hidden_, and adds the contribution of
  // these rows to grad_weight_. h has the hidden states of the rows, and g the gradients of their logits. Both may end
  // with padding rows, which are zero.
  void add_gradients(int64_t begin, int64_t rows, const at::Tensor& h, const at::Tensor& g) const {
    if (grad_hidden_.defined()) {
      const auto grad = product_nt(g.to(weight_.scalar_type()), weight_.t());
      grad_hidden_.narrow(0, begin, rows).copy_(grad.narrow(0, 0, rows));
    }
    if (grad_weight_.defined()) add_head_gradient(grad_weight_, g, h.to(wide_));
  }

  void add_chunk(int64_t begin, int64_t rows) {
    const auto ignored = ignored_.defined() ? ignored_.narrow(0, begin, rows) : at::Tensor();
    auto h = hidden_.narrow(0, begin, rows);
    if (ignored.defined()) h = h.masked_fill(ignored, 0);
    if (const int64_t more = labels_.is_cpu() ? rows_to_fill(rows) : 0; more > 0) {
      h = at::constant_pad_nd(h, {0, 0, 0, more});
    }
    auto all = product_nt(h, weight_).to(wide_).contiguous();  // its padding rows are zero and stay zero
    auto logits = all.narrow(0, 0, rows);
    if (by_rows_) {
      const auto& loops = elementwise_kernels(logits.device());
      loss_.add_(loops.cross_entropy(logits, labels_.narrow(0, begin, rows), wants_gradient()).sum(at::kDouble));
      if (wants_gradient()) add_gradients(begin, rows, h, all);
      return;
    }
    if (factor_.defined()) {
      logits.reset();
      return add_whole_rows(begin, h, std::move(all));
    }
    const auto slope = cap_logits(logits, softcap_, wants_gradient());
    subtract_row_max(logits);
    // `target` is the label's column in this part of the classes. `own` is 1 where the part has the label, else 0.
    const int64_t classes = weight_.size(0);
    const auto place = (labels_.narrow(0, begin, rows) - part_.first).unsqueeze(1);
    const auto own = place.ge(0).logical_and_(place.lt(classes)).to(wide_);
    const auto target = place.clamp_(0, std::max<int64_t>(0, classes - 1));
    // `sums` has per row: the sum of exponentials; the label's logit; on an accelerator also the number of ranks with
    // the label's class. This number is 0 for a label that no rank has as a class. The loss of the row is then NaN, or
    // 0 if the label is kIgnoredLabel.
    auto sums = at::zeros({ignored.defined() ? 3 : 2, rows, 1}, logits.options());
    if (ignored.defined()) sums[2].copy_(own);
    if (classes > 0) {
      sums[1].copy_(logits.gather(1, target)).mul_(own);
      sums[0].copy_(logits.exp_().sum(1, true));
    }
    all_reduce_shards(sums, comm::ReduceOp::kSum);
    auto losses = sums[0].log() - sums[1];
    if (ignored.defined()) {
      losses.masked_fill_(sums[2].eq(0), std::numeric_limits<double>::quiet_NaN()).masked_fill_(ignored, 0);
      sums[0].masked_fill_(ignored, std::numeric_limits<double>::infinity());
    }
    loss_.add_(losses.sum(at::kDouble));
    if (!wants_gradient()) return;
    auto g = logits.div_(sums[0]);  // softmax - onehot, written over the logits
    if (classes > 0) g.scatter_add_(1, target, own.neg());
    if (slope.defined()) g.mul_(slope);
    add_gradients(begin, rows, h, all);
  }

  at::Tensor hidden_, weight_, labels_;
  // For labels on an accelerator, [rows, 1] each: target_ is the label's class (clamped); factor_ is 1, or 0 for an
  // ignored row, or NaN for a label that is no class; minus_ is -factor_. target_, factor_ and minus_ are defined only
  // where ATen's fused log_softmax runs.
  at::Tensor ignored_, target_, factor_, minus_;
  const ClassShard& part_;
  at::ScalarType wide_;
  double softcap_;
  bool by_rows_;  // uses the loops of elementwise_kernels.h
  at::Tensor loss_, grad_hidden_, grad_weight_;
};

}  // namespace

CrossEntropySums cross_entropy_sums(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                                    const ClassShard& part, const CrossEntropyRequest& request) {
  const auto labelled = labels.is_cpu() ? std::optional<LabelledRows>(labels) : std::nullopt;
  CrossEntropyAccumulator accumulator(labelled ? labelled->of(hidden) : hidden, weight,
                                      labelled ? labelled->of(labels) : labels, part, request);
  auto sums = accumulator.run(request.chunk_bytes);
  if (labelled && request.hidden_gradient) sums.grad_hidden = labelled->to_all(sums.grad_hidden);
  if (request.weight_gradient) sums.grad_weight = sums.grad_weight.to(weight.scalar_type());
  return sums;
}

}  // namespace tessera::kernels
