#include "tessera/nn/attention/paged_cache.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/nn/attention/attention_pattern.h"
#include "tessera/nn/attention/local_heads.h"

namespace tessera::nn {
namespace {

// Copies rows `rows_in` [1, N, heads, d] into `into` [pages, heads, slots, d], at the page and slot of each row. Both
// tensors are fp32 on the CPU. at::index_put_ does the same, but took longer than the attention of a small model.
void write_rows(const at::Tensor& into, const at::Tensor& rows_in, const at::Tensor& row_pages,
                const at::Tensor& row_slots) {
  const auto from = rows_in.contiguous();
  const int64_t rows = from.size(1), heads = from.size(2), d = from.size(3);
  const int64_t of_page = into.stride(0), of_head = into.stride(1), of_slot = into.stride(2);
  const auto *pages = row_pages.const_data_ptr<int64_t>(), *slots = row_slots.const_data_ptr<int64_t>();
  const auto* source = from.const_data_ptr<float>();
  auto* const target = into.mutable_data_ptr<float>();
  for (int64_t row = 0; row < rows; ++row) {
    auto* const to = target + pages[row] * of_page + slots[row] * of_slot;
    for (int64_t head = 0; head < heads; ++head, source += d) std::copy_n(source, d, to + head * of_head);
  }
}

}  // namespace

// Computes the page and the slot of every row once, for all layers.
PagedBatch::PagedBatch(PagedKVCache& store, std::vector<kernels::PagedSequence> sequences,
                       std::vector<int64_t> logit_rows)
    : store_(&store), sequences_(std::move(sequences)), logit_rows_(at::tensor(logit_rows, at::kLong)) {
  std::vector<int64_t> pages, slots;
  for (const auto& sequence : sequences_) {
    TESSERA_CHECK(sequence.first_row == static_cast<int64_t>(pages.size()) &&
                      (sequence.first_position + sequence.rows + kernels::kPageTokens - 1) / kernels::kPageTokens <=
                          static_cast<int64_t>(sequence.pages.size()),
                  ErrorKind::kShape,
                  "[nn.paged_cache] found {} tokens from position {} of a sequence with {} pages of {} tokens, wanted "
                  "rows in order and pages up to the last token",
                  sequence.rows, sequence.first_position, sequence.pages.size(), kernels::kPageTokens);
    for (int64_t i = 0; i < sequence.rows; ++i) {
      const int64_t position = sequence.first_position + i;
      pages.push_back(sequence.pages[static_cast<size_t>(position / kernels::kPageTokens)]);
      slots.push_back(position % kernels::kPageTokens);
    }
  }
  pages_ = at::tensor(pages, at::kLong);
  slots_ = at::tensor(slots, at::kLong);
}

at::Tensor PagedBatch::attend(int64_t layer, const at::Tensor& queries, const at::Tensor& keys,
                              const at::Tensor& values, int64_t window, const AttentionScoreOptions& scores) {
  const at::NoGradGuard no_grad;
  if (is_dtensor(queries)) {
    const auto q = queries.transpose(1, 2), k = keys.transpose(1, 2), v = values.transpose(1, 2);
    TESSERA_CHECK(has_local_heads(q, k, v), ErrorKind::kShape,
                  "[nn.paged_cache] found queries with placements {} and keys with placements {}, wanted both sharded "
                  "over whole heads",
                  to_string(placements(q)), is_dtensor(k) ? to_string(placements(k)) : "a plain tensor");
    const auto own = [&](const at::Tensor& own_q, const at::Tensor& own_k, const at::Tensor& own_v) {
      return attend(layer, own_q.transpose(1, 2), own_k.transpose(1, 2), own_v.transpose(1, 2), window, scores)
          .transpose(1, 2);
    };
    return run_on_local_heads(q, k, v, own).transpose(1, 2);
  }
  const int64_t kv_heads = keys.size(2), d = keys.size(3);
  auto& stored = store_->layers_.at(static_cast<size_t>(layer));
  if (!stored.defined()) {
    stored = at::empty({store_->pages_, 2, kv_heads, kernels::kPageTokens, d}, keys.options());
  }
  TESSERA_CHECK(stored.size(2) == kv_heads && stored.size(4) == d && stored.scalar_type() == keys.scalar_type() &&
                    keys.size(1) == pages_.size(0) && keys.sizes() == values.sizes(),
                ErrorKind::kShape,
                "[nn.paged_cache] found keys {} for {} tokens, wanted one key per token in the dtype of the pages, "
                "with {} heads of {} elements",
                c10::str(keys.sizes()), pages_.size(0), stored.size(2), stored.size(4));
  const auto stored_keys = stored.select(1, 0), stored_values = stored.select(1, 1);  // [pages, heads, slots, d]
  // Write the keys and values into the pages before the attention is computed, because a token also attends to itself.
  if (!keys.is_cpu() || keys.scalar_type() != at::kFloat) {
    copy_indices_to(keys.device());
    const auto put = [&](const at::Tensor& into, const at::Tensor& from) {
      into.transpose(1, 2).index_put_({pages_, slots_}, from.squeeze(0));
    };
    put(stored_keys, keys);
    put(stored_values, values);
    return attend_gathered(queries, stored_keys, stored_values, window, scores);
  }
  write_rows(stored_keys, keys, pages_, slots_);
  write_rows(stored_values, values, pages_, slots_);
  return kernels::paged_attention({.queries = queries.squeeze(0).contiguous(),
                                   .keys = stored_keys,
                                   .values = stored_values,
                                   .sequences = sequences_,
                                   .window = window,
                                   .scale = scores.scale,
                                   .softcap = scores.softcap})
      .unsqueeze(0);
}

// Copies pages_, slots_ and the page numbers of each sequence to the device. They are the same in every layer, so only
// the call of the first layer copies them.
void PagedBatch::copy_indices_to(at::Device device) {
  if (!sequence_pages_.empty()) return;
  pages_ = pages_.to(device);
  slots_ = slots_.to(device);
  for (const auto& sequence : sequences_) {
    const std::vector<int64_t> pages(sequence.pages.begin(), sequence.pages.end());
    sequence_pages_.push_back(at::tensor(pages, at::kLong).to(device));
  }
}

// For devices and dtypes without a paged attention kernel. Gathers the pages of each sequence into contiguous keys and
// values and calls nn::attend with them as cached keys.
at::Tensor PagedBatch::attend_gathered(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                                       int64_t window, const AttentionScoreOptions& scores) const {
  std::vector<at::Tensor> results;
  for (size_t i = 0; i < sequences_.size(); ++i) {
    const auto& sequence = sequences_[i];
    const auto& pages = sequence_pages_[i];
    const int64_t end = sequence.first_position + sequence.rows;
    const auto gather = [&](const at::Tensor& from) {  // [1, heads, tokens, d]
      return from.index_select(0, pages).transpose(0, 1).reshape({1, from.size(1), -1, from.size(3)}).narrow(2, 0, end);
    };
    const auto own = queries.narrow(1, sequence.first_row, sequence.rows).transpose(1, 2);
    const auto pattern = attention_pattern(
        {.tokens = sequence.rows, .cached = sequence.first_position, .sliding_window = window}, queries.options());
    results.push_back(tessera::nn::attend(own, gather(keys), gather(values), pattern, scores).transpose(1, 2));
  }
  return at::cat(results, 1);
}

at::Tensor PagedBatch::select_logit_rows(const at::Tensor& hidden) const {
  return hidden.index_select(1, logit_rows_.to(hidden.device()));
}

}  // namespace tessera::nn
