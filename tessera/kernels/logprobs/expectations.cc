// Functions of the softmax over a whole vocabulary that is sharded over ranks: entropy, cross entropy, softmax and
// log-softmax.
#include <torch/csrc/autograd/custom_function.h>

#include <functional>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/tensor/saved_value.h"
#include "tessera/kernels/dispatch/result_form.h"
#include "tessera/kernels/logprobs/detail/softmax_sums.h"
#include "tessera/kernels/logprobs/logprobs.h"

namespace tessera::kernels {
namespace {

using detail::LogitRows;
using detail::RowTile;
using detail::SoftmaxSums;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor as_rows(const at::Tensor& values) { return values.unsqueeze(1); }

// What is needed to compute softmax and log-softmax of each row: the row's maximum, the sum of exp(logit - maximum),
// and the logarithm of this sum, each [rows, 1] in the compute dtype.
struct SoftmaxTerms {
  at::Tensor maximum, sum, log_sum;
  SoftmaxTerms(const SoftmaxSums& sums, at::ScalarType wide)
      : maximum(as_rows(detail::finite_max(sums.maximum)).to(wide)),
        sum(as_rows(sums.sum).to(wide)),
        log_sum(as_rows(sums.sum.log()).to(wide)) {}
};

// Returns a tensor of the logits' shape and dtype, which is computed in tiles of rows. `compute` gets one tile at a
// time and writes the tile's part of the result into RowTile::scratch.
at::Tensor computed_by_tiles(const at::Tensor& logits, const LogitRows& rows,
                             const std::function<void(const RowTile&)>& compute,
                             int64_t max_rows = std::numeric_limits<int64_t>::max()) {
  const auto result = at::empty(logits.sizes(), rows.options);
  if (result.numel() == 0) return result;
  const auto matrix = result.view({rows.rows, rows.columns});
  const auto visit = [&](const RowTile& tile) {
    compute(tile);
    tile.of(matrix).copy_(tile.scratch);
  };
  detail::for_row_tiles(rows, {}, visit, max_rows);
  return result;
}

std::vector<int64_t> leading_sizes(const at::Tensor& logits) {
  return logits.sizes().slice(0, static_cast<size_t>(logits.dim() - 1)).vec();
}

// ---- entropy ----

struct RowEntropies {
  at::Tensor entropy;  // sum p log p, float64 [rows]
  SoftmaxSums sums;
};

// Returns for each row of logits x the sum of p log p, where p is the softmax of x, and the SoftmaxSums of the row: the
// maximum M of x and the sum S of e^(x - M). Each rank sends three numbers per row, computed over its own columns: the
// maximum m, s = sum e^(x - m) and w = sum (x - m) e^(x - m). Over all columns, sum (x - M) e^(x - M) is the sum over
// ranks of (w + (m - M) s) e^(m - M). This number divided by S, minus log S, is the sum of p log p. COLLECTIVE over
// `part.group`, the ranks that share the vocabulary.
RowEntropies entropy_of_rows(const at::Tensor& logits, const VocabShard& part, int64_t max_rows) {
  const LogitRows rows(logits);
  const auto options = rows.options.dtype(at::kDouble);
  auto own = at::zeros({rows.rows, 3}, options);  // m, s, w
  own.select(1, 0).fill_(-std::numeric_limits<double>::infinity());
  const SoftmaxSums sums{own.select(1, 0), own.select(1, 1)};
  if (rows.columns > 0) {
    detail::for_row_tiles(
        rows, {},
        [&](const RowTile& tile) {
          const auto taken = detail::softmax_sums_of_tile(tile, sums);
          const auto z = at::sub(tile.logits, taken);
          const auto weighted = (z * tile.scratch).masked_fill_(tile.scratch.eq(0), 0);
          tile.of(own.select(1, 2)).copy_(weighted.sum(1));
        },
        max_rows);
  }
  const auto all = detail::all_gather_shards(part, own);
  const auto maximum = all.select(2, 0), sum = all.select(2, 1), weighted = all.select(2, 2);
  const auto merged = detail::merge_softmax_sums(maximum, sum);
  const auto shift = detail::finite_max(maximum).sub(detail::finite_max(merged.all.maximum));
  // On a rank whose logits of a row are all -infinity, or that has no columns, `sum` and `weighted` are 0 for the row.
  // `shift` is only used as a factor of `sum`, so the value that it has for this rank does not matter.
  const auto total = weighted.add(shift.mul(sum)).mul(merged.factors).sum(0);
  return {total.div(merged.all.sum).sub(merged.all.sum.log()), merged.all};
}

struct EntropyFunction : torch::autograd::Function<EntropyFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& logits, const VocabShard& part, int64_t max_rows) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto found = entropy_of_rows(logits, part, max_rows);
    ctx->save_for_backward({logits, found.entropy, found.sums.maximum, found.sums.sum});
    ctx->saved_data["max_rows"] = max_rows;
    return found.entropy.to(wide_type(logits.scalar_type())).view(leading_sizes(logits));
  }

  // The gradient of the logits is p (log p - sum p log p) g, with p the softmax.
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    detail::refuse_second_derivative("chunked_distributed_entropy");
    const auto saved = ctx->get_saved_variables();
    const LogitRows rows(saved[0]);
    const SoftmaxTerms terms({saved[2], saved[3]}, rows.wide);
    const auto offset = terms.log_sum + as_rows(saved[1]).to(rows.wide);
    const auto factor = grads[0].reshape({rows.rows, 1}).to(rows.wide).div(terms.sum);
    const auto compute = [&](const RowTile& tile) {
      at::Tensor z = tile.scratch;
      at::sub_out(z, tile.logits, tile.of(terms.maximum));
      const auto e = z.exp();
      z.sub_(tile.of(offset)).mul_(e).masked_fill_(e.eq(0), 0).mul_(tile.of(factor));
    };
    const at::Tensor none;
    return {computed_by_tiles(saved[0], rows, compute, ctx->saved_data["max_rows"].toInt()), none, none};
  }
};

// ---- cross entropy against another softmax ----

struct RowCrossEntropies {
  at::Tensor loss;  // float64 [rows]
  SoftmaxSums student, target;
};

// The loss is the cross entropy - sum p log q, with q the softmax of the student's logits x and p the softmax of the
// target's logits t. With M_q the maximum of x over all ranks, it is log sum e^(x - M_q) - sum p (x - M_q). Each rank
// sends five numbers per row: the maximum m_q of x and s_q = sum e^(x - m_q); the maximum m_p of t and s_p = sum e^(t -
// m_p); and sum e^(t - m_p) (x - m_q). They are merged as in entropy_of_rows. COLLECTIVE over part.group
// (VocabShard::group).
RowCrossEntropies cross_entropy_of_rows(const at::Tensor& student, const at::Tensor& target, const VocabShard& part) {
  const LogitRows q(student), p(target);
  const auto options = q.options.dtype(at::kDouble);
  auto own = at::zeros({q.rows, 5}, options);  // m_q, s_q, m_p, s_p, sum e^(target - m_p) (student - m_q)
  const double none = -std::numeric_limits<double>::infinity();
  const SoftmaxSums of_q{own.select(1, 0).fill_(none), own.select(1, 1)};
  const SoftmaxSums of_p{own.select(1, 2).fill_(none), own.select(1, 3)};
  if (q.columns > 0) {
    const auto target_rows = p.blocks.size() == 1 ? p.blocks[0].matrix : target.detach().reshape({p.rows, p.columns});
    detail::for_row_tiles(q, {}, [&](const RowTile& tile) {
      const auto z = at::sub(tile.logits, detail::softmax_sums_of_tile(tile, of_q));
      const RowTile other{tile.first, tile.rows, tile.of(target_rows), tile.scratch};
      detail::softmax_sums_of_tile(other, of_p);
      const auto weighted = (z * other.scratch).masked_fill_(other.scratch.eq(0), 0);
      tile.of(own.select(1, 4)).copy_(weighted.sum(1));
    });
  }
  const auto all = detail::all_gather_shards(part, own);
  const auto merged_q = detail::merge_softmax_sums(all.select(2, 0), all.select(2, 1));
  const auto merged_p = detail::merge_softmax_sums(all.select(2, 2), all.select(2, 3));
  const auto shift = detail::finite_max(all.select(2, 0)).sub(detail::finite_max(merged_q.all.maximum));
  const auto total = all.select(2, 4).add(shift.mul(all.select(2, 3))).mul(merged_p.factors).sum(0);
  return {merged_q.all.sum.log().sub(total.div(merged_p.all.sum)), merged_q.all, merged_p.all};
}

struct CrossEntropyFunction : torch::autograd::Function<CrossEntropyFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& student, const at::Tensor& target,
                            const VocabShard& part) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto found = cross_entropy_of_rows(student, target, part);
    ctx->save_for_backward(
        {student, target, found.student.maximum, found.student.sum, found.target.maximum, found.target.sum});
    return found.loss.to(wide_type(student.scalar_type())).view(leading_sizes(student));
  }

  // The gradient of the student's logits is (q - p) g: q is the softmax of the student, p the softmax of the target,
  // and g the gradient of the row's loss.
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    detail::refuse_second_derivative("distributed_cross_entropy");
    const auto saved = ctx->get_saved_variables();
    const LogitRows rows(saved[0]);
    const auto target_rows = saved[1].detach().reshape({rows.rows, rows.columns});
    const SoftmaxTerms q({saved[2], saved[3]}, rows.wide), p({saved[4], saved[5]}, rows.wide);
    const auto g = grads[0].reshape({rows.rows, 1}).to(rows.wide);
    const auto compute = [&](const RowTile& tile) {
      at::Tensor own = tile.scratch;
      at::sub_out(own, tile.logits, tile.of(q.maximum));
      own.exp_().div_(tile.of(q.sum));
      const auto other = at::sub(tile.of(target_rows), tile.of(p.maximum)).exp_();
      own.sub_(other.div_(tile.of(p.sum))).mul_(tile.of(g));
    };
    const at::Tensor none;
    return {computed_by_tiles(saved[0], rows, compute), none, none};
  }
};

// ---- softmax ----

// Returns the softmax, or the log-softmax where `logarithm` is true, of logits whose columns are sharded over the ranks
// of part.group (VocabShard::group). COLLECTIVE over this group.
at::Tensor softmax_of_parts(const at::Tensor& logits, const VocabShard& part, bool logarithm) {
  const LogitRows rows(logits);
  auto sums = detail::softmax_sums(rows);
  const auto all = detail::all_gather_shards(part, at::stack({sums.maximum, sums.sum}, 1));
  sums = detail::merge_softmax_sums(all.select(2, 0), all.select(2, 1)).all;
  const SoftmaxTerms terms(sums, rows.wide);
  return computed_by_tiles(logits, rows, [&](const RowTile& tile) {
    at::Tensor z = tile.scratch;
    at::sub_out(z, tile.logits, tile.of(terms.maximum));
    if (logarithm) {
      z.sub_(tile.of(terms.log_sum));
    } else {
      z.exp_().div_(tile.of(terms.sum));
    }
  });
}

struct LogSoftmaxFunction : torch::autograd::Function<LogSoftmaxFunction> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& logits, const VocabShard& part) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto result = softmax_of_parts(logits, part, true);
    ctx->save_for_backward({result});
    ctx->saved_data["part"] = make_saved_value(part);
    return result;
  }

  // The gradient of the logits is g - softmax * sum(g). Here g is the gradient of the log-softmax, and sum(g) is the
  // sum over all columns of all ranks.
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    detail::refuse_second_derivative("compute_distributed_log_softmax");
    const auto result = ctx->get_saved_variables()[0];
    const LogitRows rows(result);
    const auto g = grads[0].reshape({rows.rows, rows.columns});
    auto sum = g.sum(1, true, at::kDouble);
    if (const auto& part = saved_value<VocabShard>(ctx->saved_data["part"]); part.size() > 1) {
      comm::all_reduce(*part.group, sum, comm::ReduceOp::kSum, "log-softmax").wait();
    }
    sum = sum.to(rows.wide);
    const auto compute = [&](const RowTile& tile) {
      tile.scratch.copy_(tile.logits).exp_().mul_(tile.of(sum)).neg_().add_(tile.of(g));
    };
    return {computed_by_tiles(result, rows, compute), at::Tensor()};
  }
};

}  // namespace

at::Tensor chunked_distributed_entropy(const at::Tensor& logits, const VocabShard& part, int64_t chunk_size,
                                       bool inference_only) {
  constexpr const char* kVerb = "chunked_distributed_entropy";
  detail::check_vocab_shard(kVerb, logits, part);
  const c10::AutoGradMode mode(c10::GradMode::is_enabled() && !inference_only);
  return EntropyFunction::apply(logits, part, detail::rows_of_chunk(kVerb, logits, chunk_size));
}

at::Tensor distributed_cross_entropy(const at::Tensor& student_logits, const at::Tensor& target_logits,
                                     const VocabShard& part, bool inference_only) {
  constexpr const char* kVerb = "distributed_cross_entropy";
  detail::check_vocab_shard(kVerb, student_logits, part);
  detail::check_vocab_shard(kVerb, target_logits, part);
  TESSERA_CHECK(student_logits.sizes() == target_logits.sizes(), ErrorKind::kShape,
                "[kernels.{}] found student logits {} and target logits {}, wanted the same shape", kVerb,
                c10::str(student_logits.sizes()), c10::str(target_logits.sizes()));
  const c10::AutoGradMode mode(c10::GradMode::is_enabled() && !inference_only);
  return CrossEntropyFunction::apply(student_logits, target_logits.detach(), part);
}

at::Tensor compute_distributed_log_softmax(const at::Tensor& logits, const VocabShard& part) {
  detail::check_vocab_shard("compute_distributed_log_softmax", logits, part);
  return LogSoftmaxFunction::apply(logits, part);
}

at::Tensor compute_distributed_softmax(const at::Tensor& logits, const VocabShard& part) {
  detail::check_vocab_shard("compute_distributed_softmax", logits, part);
  const c10::NoGradGuard no_grad;
  return softmax_of_parts(logits, part, false);
}

at::Tensor vocab_parallel_log_softmax(const at::Tensor& logits, const VocabShard& part, double temperature) {
  TESSERA_CHECK(temperature > 0, ErrorKind::kConfig,
                "[kernels.vocab_parallel_log_softmax] temperature: found {}, wanted a positive number", temperature);
  const auto wide = logits.to(wide_type(logits.scalar_type()));
  return compute_distributed_log_softmax(temperature == 1 ? wide : wide / temperature, part);
}

}  // namespace tessera::kernels
