#include "tessera/kernels/logprobs/vocab_topk.h"

#include <ATen/Dispatch.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/saved_value.h"
#include "tessera/kernels/dispatch/result_form.h"
#include "tessera/kernels/logprobs/detail/local_columns.h"
#include "tessera/kernels/logprobs/detail/softmax_sums.h"

namespace tessera::kernels {
namespace {

constexpr double kFillValue = -std::numeric_limits<double>::infinity();

struct Candidate {
  double value;
  int64_t id;
  // The order of results: NaN first, then larger values, then smaller ids.
  bool operator<(const Candidate& other) const {
    const bool nan = value != value, other_nan = other.value != other.value;
    if (nan != other_nan) return nan;
    if (!nan && value != other.value) return value > other.value;
    return id < other.id;
  }
};

// Stores the first k candidates of a row, in the order of Candidate::operator<, in `best`. While the row is read,
// `best` is a heap with the last of the kept candidates at its front, so most elements of the row are rejected by one
// comparison with the front.
template <class T>
void top_of_row(const T* row, int64_t columns, int64_t start, int64_t k, std::vector<Candidate>& best) {
  best.clear();
  for (int64_t i = 0; i < columns; ++i) {
    const Candidate each{static_cast<double>(row[i]), start + i};
    if (static_cast<int64_t>(best.size()) < k) {
      best.push_back(each);
      std::push_heap(best.begin(), best.end());
    } else if (each < best.front()) {
      std::pop_heap(best.begin(), best.end());
      best.back() = each;
      std::push_heap(best.begin(), best.end());
    }
  }
  std::sort_heap(best.begin(), best.end());
}

// Writes the k largest logits of each row among this rank's columns to `values`, and their ids to `ids`. Both tensors
// are [rows, min(k, columns of the rank with the most columns)]. If this rank has fewer columns than that, the
// remaining elements keep the fill values of the caller, -infinity and the largest int64 id, which sort behind all
// candidates.
void top_of_part(const at::Tensor& logits, int64_t k, int64_t start, const at::Tensor& values, const at::Tensor& ids,
                 int64_t max_rows) {
  const detail::LogitRows rows(logits);
  const int64_t mine = std::min(k, rows.columns);
  if (mine == 0) return;
  detail::for_row_tiles(
      rows, {},
      [&](const detail::RowTile& tile) {
        if (!tile.logits.is_cpu()) {
          const auto [sorted, order] = tile.logits.sort(/*stable=*/true, 1, /*descending=*/true);
          tile.of(values).narrow(1, 0, mine).copy_(sorted.narrow(1, 0, mine));
          tile.of(ids).narrow(1, 0, mine).copy_(order.narrow(1, 0, mine) + start);
          return;
        }
        const auto matrix = tile.logits.contiguous();
        std::vector<Candidate> best;
        double* value = values.mutable_data_ptr<double>() + tile.first * values.size(1);
        int64_t* id = ids.mutable_data_ptr<int64_t>() + tile.first * values.size(1);
        AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, matrix.scalar_type(), "distributed_vocab_topk", [&] {
          for (int64_t row = 0; row < tile.rows; ++row, value += values.size(1), id += values.size(1)) {
            top_of_row(matrix.const_data_ptr<scalar_t>() + row * rows.columns, rows.columns, start, mine, best);
            for (size_t i = 0; i < best.size(); ++i) {
              value[i] = best[i].value;
              id[i] = best[i].id;
            }
          }
        });
      },
      max_rows);
}

// The first k of all ranks' candidates [size, rows, count]. The candidates are sorted by id first; the stable sort by
// value then keeps the smaller id first among equal values.
std::pair<at::Tensor, at::Tensor> top_of_all(const at::Tensor& values, const at::Tensor& ids, int64_t k) {
  const auto all_values = values.permute({1, 0, 2}).flatten(1), all_ids = ids.permute({1, 0, 2}).flatten(1);
  const auto by_id = std::get<1>(all_ids.sort(/*stable=*/true, 1, /*descending=*/false));
  const auto [sorted, order] = all_values.gather(1, by_id).sort(/*stable=*/true, 1, /*descending=*/true);
  return {sorted.narrow(1, 0, k), all_ids.gather(1, by_id).gather(1, order.narrow(1, 0, k))};
}

// All-gathers two numbers per id: the logit (0 where the rank does not have the id) and a 1 where it has it. Their sums
// over ranks are the logit and the number of ranks with the id, which must be 1.
struct GatherLogits : torch::autograd::Function<GatherLogits> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& logits, const at::Tensor& ids,
                            const VocabShard& part) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const detail::LogitRows rows(logits);
    const detail::LocalColumns local_columns(ids, part);
    const int64_t count = ids.size(1);
    auto own = at::zeros({rows.rows, 2 * count}, rows.options.dtype(at::kDouble));
    if (rows.columns > 0) {
      own.narrow(1, 0, count)
          .copy_(rows.gather(local_columns.column))
          .masked_fill_(local_columns.is_local.logical_not(), 0);
      own.narrow(1, count, count).copy_(local_columns.is_local);
    }
    const auto all = detail::all_gather_shards(part, own).sum(0);
    detail::check_owned_once("gather_logits_at_global_indices", ids, all.narrow(1, count, count), part);
    ctx->save_for_backward({ids});
    ctx->saved_data["part"] = make_saved_value(VocabShard{.start = part.start, .end = part.end});
    ctx->saved_data["sizes"] = logits.sizes().vec();
    ctx->saved_data["dtype"] = static_cast<int64_t>(logits.scalar_type());
    return all.narrow(1, 0, count).to(rows.wide);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    detail::refuse_second_derivative("gather_logits_at_global_indices");
    const auto ids = ctx->get_saved_variables()[0];
    const auto sizes = ctx->saved_data["sizes"].toIntVector();
    const detail::LocalColumns local_columns(ids, saved_value<VocabShard>(ctx->saved_data["part"]));
    const auto dtype = static_cast<at::ScalarType>(ctx->saved_data["dtype"].toInt());
    const auto g = grads[0].mul(local_columns.is_local).to(dtype);
    const auto result = at::zeros(sizes, grads[0].options().dtype(dtype));
    const at::Tensor none;
    if (result.numel() > 0) result.view({ids.size(0), sizes.back()}).scatter_add_(1, local_columns.column, g);
    return {result, none, none};
  }
};

}  // namespace

std::pair<at::Tensor, at::Tensor> distributed_vocab_topk(const at::Tensor& logits, int64_t k, const VocabShard& part,
                                                         std::optional<int64_t> chunk_size) {
  constexpr const char* kVerb = "distributed_vocab_topk";
  detail::check_vocab_shard(kVerb, logits, part);
  TESSERA_CHECK(k >= 1, ErrorKind::kShape, "[kernels.{}] k: found {}, wanted at least 1", kVerb, k);
  const c10::NoGradGuard no_grad;
  const int64_t max_rows =
      chunk_size ? detail::rows_of_chunk(kVerb, logits, *chunk_size) : std::numeric_limits<int64_t>::max();
  const auto options = logits.options().dtype(at::kLong);
  const auto widths = detail::all_gather_shards(part, at::full({1}, logits.size(-1), options));
  const int64_t found = std::min(k, widths.sum().item<int64_t>());
  // Every rank sends as many candidates as the widest part has, because an all-gather needs equal sizes.
  const int64_t each = std::min(k, widths.max().item<int64_t>());
  const int64_t rows = detail::LogitRows(logits).rows;
  const auto values = at::full({rows, each}, kFillValue, options.dtype(at::kDouble));
  const auto ids = at::full({rows, each}, std::numeric_limits<int64_t>::max(), options);
  top_of_part(logits, k, part.start, values, ids, max_rows);
  auto [top_values, top_ids] =
      top_of_all(detail::all_gather_shards(part, values), detail::all_gather_shards(part, ids), found);
  const auto shape = with_last(logits.sizes(), found);
  return {top_values.to(wide_type(logits.scalar_type())).reshape(shape), top_ids.reshape(shape)};
}

at::Tensor vocab_parallel_argmax(const at::Tensor& logits, const VocabShard& part) {
  return distributed_vocab_topk(logits, 1, part).second.squeeze(-1);
}

at::Tensor gather_logits_at_global_indices(const at::Tensor& logits, const at::Tensor& global_indices,
                                           const VocabShard& part, std::optional<int64_t> chunk_size) {
  constexpr const char* kVerb = "gather_logits_at_global_indices";
  detail::check_vocab_shard(kVerb, logits, part);
  if (chunk_size) detail::rows_of_chunk(kVerb, logits, *chunk_size);
  detail::check_ids(kVerb, logits, global_indices, true);
  const auto sizes = global_indices.sizes();
  const auto flat = global_indices.reshape({detail::LogitRows(logits).rows, sizes.back()});
  return GatherLogits::apply(logits, flat, part).view(sizes);
}

}  // namespace tessera::kernels
