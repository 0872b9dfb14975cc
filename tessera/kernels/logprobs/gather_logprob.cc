// log p at given ids: distributed_logprob, chunked_distributed_logprob and chunked_distributed_gather_logprob.
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <limits>

#include "tessera/dtensor/tensor/saved_value.h"
#include "tessera/kernels/dispatch/result_form.h"
#include "tessera/kernels/logprobs/detail/local_columns.h"
#include "tessera/kernels/logprobs/detail/softmax_sums.h"
#include "tessera/kernels/logprobs/logprobs.h"

namespace tessera::kernels {
namespace {

using detail::LogitRows;
using detail::RowTile;

// Returns bool [rows]: true where all ids of the row are kIgnoredLabel. Undefined on an accelerator, and where no row
// is ignored.
at::Tensor ignored_rows(const at::Tensor& ignored) {
  if (!ignored.device().is_cpu()) return {};
  const auto rows = ignored.all(1);
  return rows.any().item<bool>() ? rows.contiguous() : at::Tensor();
}

struct GatheredLogprobs {
  at::Tensor logprobs;  // [rows, K], float64
  detail::SoftmaxSums sums;
};

// Computes log p of the K ids of each row. All-gathers 2 + 2 K numbers per row: the maximum and the sum of the
// SoftmaxSums of this rank's columns; for each id, its logit (0 where the id is no column of this rank); and for each
// id, a 1 where it is a column of this rank, else 0. Summed over the ranks, the last 2 K numbers give the logit of each
// id and the number of ranks that have the id as a column. This number must be 1, except for kIgnoredLabel. COLLECTIVE
// over `part.group`.
GatheredLogprobs gather_logprobs(const at::Tensor& logits, const at::Tensor& ids, const VocabShard& part,
                                 int64_t max_rows) {
  const LogitRows rows(logits);
  const auto ignored = ids.eq(kIgnoredLabel);
  auto sums = detail::softmax_sums(rows, ignored_rows(ignored), max_rows);
  const detail::LocalColumns local_columns(ids, part);
  const int64_t count = ids.size(1);
  auto own = at::zeros({rows.rows, 2 + 2 * count}, sums.maximum.options());
  own.select(1, 0).copy_(sums.maximum);
  own.select(1, 1).copy_(sums.sum);
  if (rows.columns > 0) {
    own.narrow(1, 2, count)
        .copy_(rows.gather(local_columns.column))
        .masked_fill_(local_columns.is_local.logical_not(), 0);
    own.narrow(1, 2 + count, count).copy_(local_columns.is_local);
  }
  const auto all = detail::all_gather_shards(part, own);
  detail::check_owned_once("distributed_logprob", ids, all.narrow(2, 2 + count, count).sum(0), part);
  sums = detail::merge_softmax_sums(all.select(2, 0), all.select(2, 1)).all;
  const auto target = all.narrow(2, 2, count).sum(0);
  auto logprobs = target.sub_(sums.maximum.unsqueeze(1)).sub_(sums.sum.log().unsqueeze(1)).masked_fill_(ignored, 0);
  return {logprobs, sums};
}

// Returns the gradient of the logits, (onehot - softmax) g, summed over the K ids of a row. No communication: the saved
// maximum and sum are those of the whole vocabulary. Rows whose ids are all ignored get zeros, also where their logits
// are infinite or NaN.
at::Tensor gather_logprobs_backward(const at::Tensor& grad, const at::Tensor& logits, const at::Tensor& ids,
                                    const detail::SoftmaxSums& sums, const VocabShard& part, int64_t max_rows) {
  const LogitRows rows(logits);
  const auto result = at::empty(logits.sizes(), rows.options);
  if (result.numel() == 0) return result;
  const auto matrix = result.view({rows.rows, rows.columns});
  const auto ignored = ids.eq(kIgnoredLabel);
  const auto skip = ignored_rows(ignored);
  const auto g = grad.reshape(ids.sizes()).to(rows.wide).masked_fill(ignored, 0);
  const auto factor = g.sum(1, true).neg_().div_(sums.sum.unsqueeze(1).to(rows.wide));
  const auto maximum = detail::finite_max(sums.maximum).unsqueeze(1).to(rows.wide);
  const detail::LocalColumns local_columns(ids, part);
  const auto own_g = g * local_columns.is_local;
  const auto dead = ignored.all(1, true);
  const bool some_dead = skip.defined() || !dead.device().is_cpu();
  if (skip.defined()) result.zero_();
  const bool direct = rows.wide == logits.scalar_type();
  detail::for_row_tiles(
      rows, skip,
      [&](const RowTile& tile) {
        const auto target = tile.of(matrix);
        at::Tensor buffer = direct ? target : tile.scratch;
        at::sub_out(buffer, tile.logits, tile.of(maximum));
        buffer.exp_().mul_(tile.of(factor));
        if (some_dead) buffer.masked_fill_(tile.of(dead), 0);
        buffer.scatter_add_(1, tile.of(local_columns.column), tile.of(own_g));
        if (!direct) target.copy_(buffer);
      },
      max_rows);
  return result;
}

// logits [..., V], ids [rows, K] -> [rows, K]
struct GatherLogprobs : torch::autograd::Function<GatherLogprobs> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& logits, const at::Tensor& ids,
                            const VocabShard& part, int64_t max_rows) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto found = gather_logprobs(logits, ids, part, max_rows);
    ctx->save_for_backward({logits, ids, found.sums.maximum, found.sums.sum});
    ctx->saved_data["part"] = make_saved_value(VocabShard{.start = part.start, .end = part.end});
    ctx->saved_data["max_rows"] = max_rows;
    return found.logprobs.to(wide_type(logits.scalar_type()));
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    detail::refuse_second_derivative("distributed_logprob");
    const auto saved = ctx->get_saved_variables();
    const VocabShard& part = saved_value<VocabShard>(ctx->saved_data["part"]);
    const at::Tensor none;
    return {gather_logprobs_backward(grads[0], saved[0], saved[1], {saved[2], saved[3]}, part,
                                     ctx->saved_data["max_rows"].toInt()),
            none, none, none};
  }
};

at::Tensor logprobs_at(const char* verb, const at::Tensor& logits, const at::Tensor& ids, const VocabShard& part,
                       int64_t max_rows, bool inference_only, bool many) {
  detail::check_vocab_shard(verb, logits, part);
  detail::check_ids(verb, logits, ids, many);
  const auto found = ids.sizes();
  const auto flat = ids.reshape({detail::LogitRows(logits).rows, many ? ids.size(-1) : 1});
  const at::AutoGradMode mode(at::GradMode::is_enabled() && !inference_only);
  return GatherLogprobs::apply(logits, flat, part, max_rows).view(found);
}

}  // namespace

at::Tensor distributed_logprob(const at::Tensor& logits, const at::Tensor& target, const VocabShard& part,
                               bool inference_only) {
  return logprobs_at("distributed_logprob", logits, target, part, std::numeric_limits<int64_t>::max(), inference_only,
                     false);
}

at::Tensor chunked_distributed_logprob(const at::Tensor& logits, const at::Tensor& target, const VocabShard& part,
                                       int64_t chunk_size, bool inference_only) {
  constexpr const char* kVerb = "chunked_distributed_logprob";
  return logprobs_at(kVerb, logits, target, part, detail::rows_of_chunk(kVerb, logits, chunk_size), inference_only,
                     false);
}

at::Tensor chunked_distributed_gather_logprob(const at::Tensor& logits, const at::Tensor& global_indices,
                                              const VocabShard& part, int64_t chunk_size, bool inference_only) {
  constexpr const char* kVerb = "chunked_distributed_gather_logprob";
  return logprobs_at(kVerb, logits, global_indices, part, detail::rows_of_chunk(kVerb, logits, chunk_size),
                     inference_only, true);
}

}  // namespace tessera::kernels
