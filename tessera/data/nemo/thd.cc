#include "tessera/data/nemo/thd.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

#include "tessera/base/error.h"

namespace tessera::data {
namespace {

struct SequenceLengths {
  std::vector<int64_t> real, padded;
};

void check_thd_input(const ThdInput& input) {
  const auto& ids = input.input_ids;
  TESSERA_CHECK(ids.defined() && (ids.dim() == 2 || ids.dim() == 3) && ids.size(0) > 0, ErrorKind::kShape,
                "[data.process_input_for_thd] input_ids: found {}, wanted [B, S] or [B, S, H] with at least one row.",
                ids.defined() ? c10::str(ids.sizes()) : "nothing");
  const auto rows = ids.sizes().slice(0, 2);
  TESSERA_CHECK(!input.labels.defined() || input.labels.sizes() == rows, ErrorKind::kShape,
                "[data.process_input_for_thd] labels: found {}, wanted {}, the shape of the tokens.",
                c10::str(input.labels.sizes()), c10::str(rows));
  const auto& positions = input.position_ids;
  TESSERA_CHECK(
      !positions.defined() || positions.sizes() == rows || (positions.dim() == 3 && positions.sizes().slice(1) == rows),
      ErrorKind::kShape,
      "[data.process_input_for_thd] position_ids: found {}, wanted {}, the shape of the tokens, or that with a dim in "
      "front.",
      c10::str(positions.sizes()), c10::str(rows));
  for (const auto* lens : {&input.seq_lens, &input.seq_lens_padded}) {
    TESSERA_CHECK(!lens->defined() || (lens->dim() == 2 && lens->size(0) == rows[0] && input.seq_lens.defined() &&
                                       lens->sizes() == input.seq_lens.sizes()),
                  ErrorKind::kShape,
                  "[data.process_input_for_thd] lengths: found {}, wanted [{}, packs], the same for seq_lens and "
                  "seq_lens_padded.",
                  c10::str(lens->sizes()), rows[0]);
  }
}

// Appends the lengths of the sequences of one row to `out`. Entries of `real` and `padded` that equal `unused_value`
// stand for no sequence and are skipped. The padded lengths of every row except the last must fill the row, because
// cu_seqlens of the flattened batch assumes that each row begins where the last padded sequence of the previous row
// ends.
void add_row_lengths(SequenceLengths& out, const int64_t* real, const int64_t* padded, int64_t packs, int64_t row,
                     int64_t row_tokens, bool last, int64_t unused_value) {
  int64_t sum = 0;
  for (int64_t i = 0; i < packs; ++i) {
    TESSERA_CHECK(
        (real[i] == unused_value) == (padded[i] == unused_value), ErrorKind::kShape,
        "[data.process_input_for_thd] row {}, sequence {}: found lengths {} and {} with padding, only one of which is "
        "the value of an unused entry.",
        row, i, real[i], padded[i]);
    if (real[i] == unused_value) continue;
    TESSERA_CHECK(0 <= real[i] && real[i] <= padded[i] && padded[i] <= row_tokens - sum, ErrorKind::kShape,
                  "[data.process_input_for_thd] row {}, sequence {}: found {} tokens and {} with padding behind {} "
                  "others, wanted them within the row of {}.",
                  row, i, real[i], padded[i], sum, row_tokens);
    sum += padded[i];
    out.real.push_back(real[i]);
    out.padded.push_back(padded[i]);
  }
  TESSERA_CHECK(
      last || sum == row_tokens, ErrorKind::kShape,
      "[data.process_input_for_thd] row {}: its padded lengths sum to {}, wanted all {} tokens, as other rows "
      "follow it. Count the padding behind the last sequence as its own.",
      row, sum, row_tokens);
}

SequenceLengths lengths_of(const ThdInput& input, int64_t unused_value) {
  const auto real = input.seq_lens.to(at::kCPU, at::kLong).contiguous();
  const auto padded =
      input.seq_lens_padded.defined() ? input.seq_lens_padded.to(at::kCPU, at::kLong).contiguous() : real;
  SequenceLengths out;
  const int64_t rows = real.size(0), packs = real.size(1);
  for (int64_t row = 0; row < rows; ++row) {
    add_row_lengths(out, real.const_data_ptr<int64_t>() + row * packs, padded.const_data_ptr<int64_t>() + row * packs,
                    packs, row, input.input_ids.size(1), row + 1 == rows, unused_value);
  }
  return out;
}

std::vector<int64_t> sums_before(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> sums = {0};
  for (const int64_t length : lengths) sums.push_back(sums.back() + length);
  return sums;
}

// Padding is everything except the real tokens of each sequence. A sequence begins where the padded lengths before it
// end.
at::Tensor mask_of_lengths(const SequenceLengths& lengths, int64_t tokens) {
  const auto mask = at::ones({tokens}, at::kBool);
  int64_t begin = 0;
  for (size_t i = 0; i < lengths.real.size(); ++i) {
    mask.narrow(0, begin, lengths.real[i]).fill_(false);
    begin += lengths.padded[i];
  }
  return mask;
}

at::Tensor mask_of_tokens(const at::Tensor& input_ids, int64_t padding) {
  TESSERA_CHECK(input_ids.dim() == 2, ErrorKind::kShape,
                "[data.process_input_for_thd] embeddings {} without seq_lens: padding cannot be recognised. Give the "
                "lengths.",
                c10::str(input_ids.sizes()));
  const auto mask = input_ids.eq(padding);
  // The running maximum of a row's mask is 1 from the first padding token on. It must equal the mask itself, because no
  // other token may come after padding.
  const auto behind = mask.to(at::kInt).cummax(1);
  TESSERA_CHECK(std::get<0>(behind).to(at::kBool).equal(mask), ErrorKind::kShape,
                "[data.process_input_for_thd] the padding token {} comes before another token, and without seq_lens "
                "padding cannot be recognised. Give the lengths.",
                padding);
  return mask.flatten();
}

// Sets cu_seqlens, cu_seqlens_padded and max_seqlen of `batch`. `grows` says whether the caller gave padded lengths,
// too. If the prefix sums of the real and of the padded lengths differ at most in the last entry, cu_seqlens_padded
// stays undefined; with `grows` the last entry of cu_seqlens is then `tokens`, so that the last sequence includes the
// padding at the end, as in NeMo.
void set_lengths(ThdBatch& batch, const SequenceLengths& lengths, int64_t tokens, bool grows) {
  auto real = sums_before(lengths.real);
  const auto padded = sums_before(lengths.padded);
  const bool last_alone = std::equal(real.begin(), real.end() - 1, padded.begin());
  if (grows && last_alone && !lengths.real.empty()) real.back() = tokens;
  batch.cu_seqlens = at::tensor(real, at::kInt);
  if (!last_alone) batch.cu_seqlens_padded = at::tensor(padded, at::kInt);
  for (size_t i = 0; i + 1 < real.size(); ++i) batch.max_seqlen = std::max(batch.max_seqlen, real[i + 1] - real[i]);
}

}  // namespace

ThdBatch process_input_for_thd(const ThdInput& input, const ThdOptions& options) {
  check_thd_input(input);
  const auto& ids = input.input_ids;
  const int64_t tokens = ids.size(0) * ids.size(1);
  ThdBatch batch;
  if (input.seq_lens.defined()) {
    const auto lengths = lengths_of(input, options.seq_lens_padding_value);
    set_lengths(batch, lengths, tokens, input.seq_lens_padded.defined());
    batch.padding_mask = mask_of_lengths(lengths, tokens).to(ids.device());
  } else {
    batch.padding_mask = mask_of_tokens(ids, options.padding_token_id);
  }
  batch.input_ids = ids.flatten(0, 1);
  if (input.labels.defined()) batch.labels = input.labels.flatten();
  if (input.position_ids.defined()) {
    const auto& positions = input.position_ids;
    batch.position_ids = positions.dim() == 3 ? positions.reshape({positions.size(0), 1, tokens}) : positions.flatten();
  }
  return batch;
}

ThdChunks split_batch_into_thd_chunks(const ThdInput& input, int64_t num_chunks, const ThdOptions& options) {
  if (num_chunks <= 1) {
    auto batch = process_input_for_thd(input, options);
    const auto max_seqlen = at::tensor({batch.max_seqlen}, at::kLong);
    return {.batch = std::move(batch), .max_seqlen = max_seqlen};
  }
  check_thd_input(input);
  const int64_t rows = input.input_ids.size(0);
  TESSERA_CHECK(
      rows % num_chunks == 0, ErrorKind::kShape,
      "[data.split_batch_into_thd_chunks] found {} rows for {} chunks, wanted a multiple. Choose a batch size "
      "that the number of micro-batches divides.",
      rows, num_chunks);
  std::vector<ThdBatch> parts;
  for (int64_t i = 0; i < num_chunks; ++i) {
    const auto part = [&](const at::Tensor& tensor, int64_t dim = 0) {
      return tensor.defined() ? tensor.narrow(dim, i * (rows / num_chunks), rows / num_chunks) : tensor;
    };
    const int64_t axes = input.position_ids.defined() && input.position_ids.dim() == 3 ? 1 : 0;
    parts.push_back(process_input_for_thd({part(input.input_ids), part(input.labels), part(input.position_ids, axes),
                                           part(input.seq_lens), part(input.seq_lens_padded)},
                                          options));
  }
  const bool some_padded =
      std::ranges::any_of(parts, [](const ThdBatch& part) { return part.cu_seqlens_padded.defined(); });
  int64_t longest = 0;
  for (const auto& part : parts) longest = std::max(longest, part.cu_seqlens.defined() ? part.cu_seqlens.numel() : 0);
  const auto stacked = [&](auto value) {
    std::vector<at::Tensor> values;
    for (const auto& part : parts) values.push_back(value(part));
    return values[0].defined() ? at::stack(values) : at::Tensor();
  };
  const auto bounds = [&](const at::Tensor& cu_seqlens) {
    // Chunks have different numbers of sequences, so shorter cu_seqlens are filled up before stacking.
    if (!cu_seqlens.defined()) return cu_seqlens;
    return at::constant_pad_nd(cu_seqlens, {0, longest - cu_seqlens.numel()}, options.seq_lens_padding_value);
  };
  ThdChunks out{.batch = {}, .max_seqlen = {}, .chunks = num_chunks};
  out.batch.input_ids = stacked([](const ThdBatch& part) { return part.input_ids; });
  out.batch.labels = stacked([](const ThdBatch& part) { return part.labels; });
  out.batch.position_ids = stacked([](const ThdBatch& part) { return part.position_ids; });
  out.batch.padding_mask = stacked([](const ThdBatch& part) { return part.padding_mask; });
  out.batch.cu_seqlens = stacked([&](const ThdBatch& part) { return bounds(part.cu_seqlens); });
  if (some_padded) {
    out.batch.cu_seqlens_padded = stacked([&](const ThdBatch& part) {
      return bounds(part.cu_seqlens_padded.defined() ? part.cu_seqlens_padded : part.cu_seqlens);
    });
  }
  out.max_seqlen = stacked([](const ThdBatch& part) { return at::tensor({part.max_seqlen}, at::kLong); }).flatten();
  out.batch.max_seqlen = out.max_seqlen.max().item<int64_t>();
  return out;
}

at::Tensor thd_document_ids(const ThdBatch& batch) {
  const auto& mask = batch.padding_mask;
  TESSERA_CHECK(mask.defined() && mask.dim() == 1, ErrorKind::kShape,
                "[data.thd_document_ids] found a padding mask {}, wanted the mask of one chunk, [T].",
                mask.defined() ? c10::str(mask.sizes()) : "that is undefined");
  const auto ids = at::zeros({mask.numel()}, at::kLong);
  const auto& bounds = batch.cu_seqlens_padded.defined() ? batch.cu_seqlens_padded : batch.cu_seqlens;
  if (bounds.defined()) {
    for (int64_t i = 0; i + 1 < bounds.numel(); ++i) {
      const int64_t begin = bounds[i].item<int64_t>(), end = bounds[i + 1].item<int64_t>();
      if (end < 0) break;  // the rest fills up a chunk with fewer sequences
      TESSERA_CHECK(begin >= 0 && begin <= end && end <= mask.numel(), ErrorKind::kShape,
                    "[data.thd_document_ids] found bounds {} and {} of {} tokens, wanted rising bounds.", begin, end,
                    mask.numel());
      ids.narrow(0, begin, end - begin).fill_(i);
    }
  }
  return ids.to(mask.device()).masked_fill(mask, -1).unsqueeze(0);
}

}  // namespace tessera::data
