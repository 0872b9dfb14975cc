#include "tessera/kernels/logprobs/sampling.h"

#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/base/ignored_label.h"
#include "tessera/base/log.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/dtensor/tensor/layout.h"
#include "tessera/dtensor/tensor/saved_value.h"
#include "tessera/kernels/dispatch/result_form.h"
#include "tessera/kernels/logprobs/detail/local_columns.h"
#include "tessera/kernels/logprobs/detail/softmax_sums.h"
#include "tessera/kernels/loss/head_chunks.h"

namespace tessera::kernels {
namespace {

constexpr int64_t kExchangeBytes = int64_t{64} << 20;
constexpr double kExcluded = -std::numeric_limits<double>::infinity();

bool limits_k(const TrainingSamplingParams& sampling) { return sampling.top_k && *sampling.top_k > 0; }

void check_sampling(const TrainingSamplingParams& sampling, int64_t vocabulary) {
  TESSERA_CHECK(!limits_k(sampling) || *sampling.top_k <= vocabulary, ErrorKind::kConfig,
                "[kernels.sampling] top_k: found {}, wanted at most the {} tokens of the vocabulary", *sampling.top_k,
                vocabulary);
  TESSERA_CHECK(sampling.top_p >= 0 && sampling.top_p <= 1, ErrorKind::kConfig,
                "[kernels.sampling] top_p: found {}, wanted 0 to 1", sampling.top_p);
}

// Returns bool [rows, V]: true for the tokens that the filter keeps. The tokens of a row are sorted by ascending logit,
// and the cumulated probability of a token is the sum over all tokens up to it. top_p keeps the tokens whose cumulated
// probability is above 1 - top_p, and always the last token, which has the largest logit.
at::Tensor kept_tokens(const at::Tensor& rows, const TrainingSamplingParams& sampling) {
  if (sampling.top_p == 1) {
    const auto least = std::get<0>(rows.topk(*sampling.top_k, 1)).narrow(1, *sampling.top_k - 1, 1);
    return rows.ge(least);
  }
  auto [sorted, order] = rows.sort(/*stable=*/true, 1, /*descending=*/false);
  const int64_t last = rows.size(1) - 1;
  if (limits_k(sampling)) {
    const auto least = sorted.narrow(1, rows.size(1) - *sampling.top_k, 1).clone();
    sorted.masked_fill_(sorted.lt(least), kExcluded);
  }
  auto kept = sorted.softmax(1).cumsum(1).gt(1 - sampling.top_p);
  kept.select(1, last).fill_(true);
  return at::zeros_like(kept).scatter_(1, order, kept);
}

// ---- exchange of logits between column shards and row shards ----

// Exchanges logits between column shards and row shards, in chunks of rows. Before all_to_all_to_rows() every rank has
// its own columns of the chunk, [count, own columns]; after it every rank has all columns of its own rows, [own rows,
// V]. all_to_all_to_columns() is the inverse. Each is one all-to-all. All ranks compute the same chunk sizes, so their
// collectives match. The constructor and both exchanges are COLLECTIVE over VocabShard::group.
class RowExchange {
 public:
  RowExchange(const at::Tensor& logits, const VocabShard& part, int64_t max_rows) : part_(part), own_(logits.size(-1)) {
    const auto sizes = at::full({1, 2}, own_, at::kLong);
    sizes.select(1, 1).fill_(part.start);
    const auto all = detail::all_gather_shards(part, sizes.to(logits.device())).to(at::kCPU);
    for (int64_t rank = 0; rank < part.size(); ++rank) {
      columns_.push_back(all[rank][0][0].item<int64_t>());
      starts_.push_back(all[rank][0][1].item<int64_t>());
      vocabulary_ += columns_.back();
    }
    const auto row_bytes = std::max<int64_t>(1, vocabulary_) * static_cast<int64_t>(logits.itemsize());
    max_rows_ = std::max<int64_t>(1, std::min(max_rows, kExchangeBytes / row_bytes * part.size()));
  }

  int64_t vocabulary() const { return vocabulary_; }
  int64_t max_rows() const { return max_rows_; }
  // Returns the range of rows that this rank filters in a chunk of `count` rows.
  LocalRange own_rows(int64_t count) const {
    const auto range = local_range(count, part_.size(), rank());
    return {range.size, std::min(range.offset, count)};
  }

  // [count, own columns] on every rank becomes [own rows, V] on every rank, with the columns in the order of their ids.
  at::Tensor all_to_all_to_rows(const at::Tensor& columns) const {
    if (part_.size() == 1) return columns;
    const int64_t count = columns.size(0), mine = own_rows(count).size;
    const auto [by_rows, by_columns] = exchanged_elements(count);
    const auto received = at::empty({mine * vocabulary_}, columns.options());
    comm::all_to_all_single(*part_.group, received, columns.reshape({-1}), by_columns, by_rows, "sampling").wait();
    const auto rows = at::empty({mine, vocabulary_}, columns.options());
    const auto parts = received.split_with_sizes(by_columns);
    for (size_t rank = 0; rank < columns_.size(); ++rank) {
      rows.narrow(1, starts_[rank], columns_[rank]).copy_(parts[rank].view({mine, columns_[rank]}));
    }
    return rows;
  }

  // The inverse of all_to_all_to_rows; writes into `columns`.
  void all_to_all_to_columns(const at::Tensor& rows, const at::Tensor& columns) const {
    if (part_.size() == 1) {
      columns.copy_(rows);
      return;
    }
    const int64_t count = columns.size(0), mine = rows.size(0);
    const auto [by_rows, by_columns] = exchanged_elements(count);
    const auto sending = at::empty({mine * vocabulary_}, columns.options());
    const auto parts = sending.split_with_sizes(by_columns);
    for (size_t rank = 0; rank < columns_.size(); ++rank) {
      parts[rank].view({mine, columns_[rank]}).copy_(rows.narrow(1, starts_[rank], columns_[rank]));
    }
    const auto received = at::empty({count * own_}, columns.options());
    comm::all_to_all_single(*part_.group, received, sending, by_rows, by_columns, "sampling").wait();
    columns.copy_(received.view({count, own_}));
  }

  // Makes `values` the same on all ranks: each value is set on one rank and 0 on the others, so the sum is the value.
  void sum_over_ranks(const at::Tensor& values) const {
    if (part_.size() > 1 && values.numel() > 0) {
      comm::all_reduce(*part_.group, values, comm::ReduceOp::kSum, "sampling").wait();
    }
  }

 private:
  // Returns two lists of element counts for a chunk of `count` rows, with one entry for each rank r of the group. First
  // list: the rows that rank r filters times the columns of this rank. Second list: the rows that this rank filters
  // times the columns of rank r.
  std::pair<std::vector<int64_t>, std::vector<int64_t>> exchanged_elements(int64_t count) const {
    std::vector<int64_t> by_rows, by_columns;
    const int64_t mine = own_rows(count).size;
    for (int64_t rank = 0; rank < part_.size(); ++rank) {
      by_rows.push_back(local_range(count, part_.size(), rank).size * own_);
      by_columns.push_back(mine * columns_[static_cast<size_t>(rank)]);
    }
    return {by_rows, by_columns};
  }
  int64_t rank() const { return part_.group ? part_.group->rank() : 0; }

  VocabShard part_;
  int64_t own_;
  std::vector<int64_t> columns_, starts_;
  int64_t vocabulary_ = 0;
  int64_t max_rows_ = 1;
};

// Every rank checks all targets against the whole vocabulary, so an unknown id is an error on all ranks.
void check_columns(const RowExchange& exchange, const at::Tensor& target) {
  const int64_t at = first_wrong_label(target, exchange.vocabulary());
  if (at < 0) return;
  raise(ErrorKind::kShape,
        "[kernels.distributed_logprob_with_sampling] target {}: found id {}, wanted one of the {} ids, or {}", at,
        target[at].item<int64_t>(), exchange.vocabulary(), kIgnoredLabel);
}

// The rows of a chunk that this rank filters (RowExchange::own_rows), with the logits after top-k and top-p, and the
// column of each row's target.
struct FilteredRows {
  at::Tensor logits;         // [rows, V]
  at::Tensor target_column;  // [rows, 1]: the target's column, 0 where it is ignored
  at::Tensor ignored;        // bool [rows, 1]
  detail::SoftmaxSums sums;
};

FilteredRows filter_rows(const at::Tensor& rows, const at::Tensor& target, const TrainingSamplingParams& sampling) {
  FilteredRows found;
  found.logits = apply_top_k_top_p(rows, sampling).first;
  found.ignored = target.eq(kIgnoredLabel).unsqueeze(1);
  found.target_column = target.unsqueeze(1).masked_fill(found.ignored, 0);
  found.sums = detail::softmax_sums(detail::LogitRows(found.logits));
  return found;
}

// Calls visit(first row, number of rows, own rows) for every chunk. The own rows are the range of rows of the chunk
// that this rank filters; its offset counts from the first row of the chunk.
template <class Visit>
void for_chunks(const RowExchange& exchange, int64_t rows, Visit visit) {
  for (int64_t begin = 0; begin < rows; begin += exchange.max_rows()) {
    const int64_t count = std::min(exchange.max_rows(), rows - begin);
    visit(begin, count, exchange.own_rows(count));
  }
}

// Returns the log-probs of `target` after the filter of `sampling`, float64 [rows], the same on every rank. The rows
// are processed in chunks, and each rank computes some rows of each chunk. A sum over the ranks then gives every rank
// the results of all rows. COLLECTIVE over part.group.
at::Tensor sampled_logprobs(const at::Tensor& matrix, const at::Tensor& target, const VocabShard& part,
                            const TrainingSamplingParams& sampling, int64_t max_rows) {
  const RowExchange exchange(matrix, part, max_rows);
  check_sampling(sampling, exchange.vocabulary());
  check_columns(exchange, target);
  const auto result = at::zeros({matrix.size(0)}, matrix.options().dtype(at::kDouble));
  for_chunks(exchange, matrix.size(0), [&](int64_t begin, int64_t count, const LocalRange& own) {
    const auto rows = exchange.all_to_all_to_rows(matrix.narrow(0, begin, count));
    if (own.size == 0) return;
    const auto found = filter_rows(rows, target.narrow(0, begin + own.offset, own.size), sampling);
    const auto chosen = found.logits.gather(1, found.target_column).to(at::kDouble).squeeze(1);
    result.narrow(0, begin + own.offset, own.size)
        .copy_(chosen.sub(found.sums.maximum).sub_(found.sums.sum.log()).masked_fill_(found.ignored.squeeze(1), 0));
  });
  exchange.sum_over_ranks(result);
  return result;
}

// Returns the gradient of the logits: (onehot - softmax) times the row's value in `grad` for the tokens that the filter
// of `sampling` keeps, 0 for all other tokens. The rows are exchanged and filtered again, so that whole rows need not
// stay in memory from forward to backward. COLLECTIVE over part.group.
at::Tensor sampled_logprobs_backward(const at::Tensor& grad, const at::Tensor& matrix, const at::Tensor& target,
                                     const VocabShard& part, const TrainingSamplingParams& sampling, int64_t max_rows) {
  const RowExchange exchange(matrix, part, max_rows);
  const auto result = at::empty(matrix.sizes(), matrix.options());
  const auto wide = wide_type(matrix.scalar_type());
  for_chunks(exchange, matrix.size(0), [&](int64_t begin, int64_t count, const LocalRange& own) {
    const auto rows = exchange.all_to_all_to_rows(matrix.narrow(0, begin, count));
    auto gradient = at::empty(rows.sizes(), rows.options());
    if (own.size > 0) {
      const auto found = filter_rows(rows, target.narrow(0, begin + own.offset, own.size), sampling);
      const auto g = grad.narrow(0, begin + own.offset, own.size).unsqueeze(1).to(wide).masked_fill(found.ignored, 0);
      const auto maximum = found.sums.maximum.unsqueeze(1).to(wide);
      auto softmax = found.logits.to(wide).sub(maximum).exp_().div_(found.sums.sum.unsqueeze(1).to(wide));
      const auto kept = found.logits.gather(1, found.target_column).ne(kExcluded);
      softmax.mul_(g.neg()).masked_fill_(found.ignored, 0).scatter_add_(1, found.target_column, g * kept);
      gradient.copy_(softmax);
    }
    exchange.all_to_all_to_columns(gradient, result.narrow(0, begin, count));
  });
  return result;
}

// logits [..., V], target [rows] -> [rows]
struct SampledLogprobs : torch::autograd::Function<SampledLogprobs> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& logits, const at::Tensor& target,
                            const VocabShard& part, const TrainingSamplingParams& sampling, int64_t max_rows) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto matrix = logits.detach().reshape({target.size(0), logits.size(-1)});
    const auto found = sampled_logprobs(matrix, target, part, sampling, max_rows);
    ctx->save_for_backward({logits, target});
    ctx->saved_data["part"] = make_saved_value(part);
    ctx->saved_data["sampling"] = make_saved_value(sampling);
    ctx->saved_data["max_rows"] = max_rows;
    return found.to(wide_type(logits.scalar_type()));
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    detail::refuse_second_derivative("distributed_logprob_with_sampling");
    const auto saved = ctx->get_saved_variables();
    auto& data = ctx->saved_data;
    const VocabShard part = saved_value<VocabShard>(data["part"]);
    const auto& sampling = saved_value<TrainingSamplingParams>(data["sampling"]);
    const auto matrix = saved[0].detach().reshape({saved[1].size(0), saved[0].size(-1)});
    const auto gradient =
        sampled_logprobs_backward(grads[0], matrix, saved[1], part, sampling, data["max_rows"].toInt());
    const at::Tensor none;
    return {gradient.view(saved[0].sizes()), none, none, none, none};
  }
};

at::Tensor logprobs_with_sampling(const char* verb, const at::Tensor& logits, const at::Tensor& target,
                                  const VocabShard& part, const TrainingSamplingParams& sampling, int64_t max_rows,
                                  bool inference_only) {
  detail::check_vocab_shard(verb, logits, part);
  detail::check_ids(verb, logits, target, false);
  const c10::AutoGradMode mode(c10::GradMode::is_enabled() && !inference_only);
  return SampledLogprobs::apply(logits, target.reshape({target.numel()}), part, sampling, max_rows)
      .view(target.sizes());
}

}  // namespace

bool need_top_k_or_top_p_filtering(const TrainingSamplingParams& sampling) {
  return limits_k(sampling) || sampling.top_p != 1;
}

std::pair<at::Tensor, at::Tensor> apply_top_k_top_p(const at::Tensor& logits, const TrainingSamplingParams& sampling,
                                                    int64_t chunk_size) {
  TESSERA_CHECK(logits.dim() >= 1 && logits.is_floating_point() && chunk_size > 0, ErrorKind::kShape,
                "[kernels.apply_top_k_top_p] found {} dims of {} and chunks of {}, wanted [..., V] of a floating dtype "
                "and at least 1 row",
                logits.dim(), c10::toString(logits.scalar_type()), chunk_size);
  if (!need_top_k_or_top_p_filtering(sampling)) return {logits, {}};
  check_sampling(sampling, logits.size(-1));
  at::Tensor kept;
  {
    const c10::NoGradGuard no_grad;
    kept = at::ones(logits.sizes(), logits.options().dtype(at::kBool));
    if (logits.numel() > 0) {
      const auto rows = logits.detach().reshape({-1, logits.size(-1)});
      const auto matrix = kept.view(rows.sizes());
      for (int64_t begin = 0; begin < rows.size(0); begin += chunk_size) {
        const int64_t count = std::min(chunk_size, rows.size(0) - begin);
        matrix.narrow(0, begin, count).copy_(kept_tokens(rows.narrow(0, begin, count), sampling));
      }
    }
  }
  return {logits.masked_fill(kept.logical_not(), kExcluded), kept};
}

at::Tensor distributed_logprob_with_sampling(const at::Tensor& logits, const at::Tensor& target, const VocabShard& part,
                                             const TrainingSamplingParams& sampling, bool inference_only) {
  return logprobs_with_sampling("distributed_logprob_with_sampling", logits, target, part, sampling,
                                std::numeric_limits<int64_t>::max(), inference_only);
}

at::Tensor chunked_distributed_logprob_with_sampling(const at::Tensor& logits, const at::Tensor& target,
                                                     const VocabShard& part, int64_t chunk_size,
                                                     const TrainingSamplingParams& sampling, bool inference_only) {
  constexpr const char* kVerb = "chunked_distributed_logprob_with_sampling";
  return logprobs_with_sampling(kVerb, logits, target, part, sampling, detail::rows_of_chunk(kVerb, logits, chunk_size),
                                inference_only);
}

at::Tensor mask_out_neg_inf_logprobs(const at::Tensor& logprobs, const at::Tensor& mask, std::string_view name) {
  const auto infinite = logprobs.detach().isinf();
  const auto unmasked = mask.ne(0);
  const auto count = infinite.logical_and(unmasked).sum().item<int64_t>();
  if (count > 0) {
    log_warning(
        "[kernels.logprobs] {}: {} of {} log-probs are infinite because top_k or top_p excludes their tokens; they "
        "count as 0",
        name, count, unmasked.sum().item<int64_t>());
  }
  return logprobs.masked_fill(infinite.logical_or(unmasked.logical_not()), 0);
}

}  // namespace tessera::kernels
