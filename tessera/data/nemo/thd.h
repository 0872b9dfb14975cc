// Converts packed rows to one row of tokens with cumulative lengths ("THD"), the input of variable-length kernels.
//
//   const ThdBatch batch = process_input_for_thd({.input_ids = ids, .labels = labels, .position_ids = positions,
//                                                 .seq_lens = lens, .seq_lens_padded = padded});
//   batch.cu_seqlens;                                       // int32 [n + 1]: 0, 3, 5, 11
//   model->loss_sum({.tokens = batch.input_ids.unsqueeze(0), .document_ids = thd_document_ids(batch)}, ...);
//
// Semantics of NeMo AutoModel's thd_utils. The tensors are on the host. No communication. Thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera::data {

struct ThdOptions {
  int64_t seq_lens_padding_value = -1000;  // unused entries of the length tensors
  int64_t padding_token_id = 0;
};

// Each row holds packed sequences one after another; each sequence is followed by its own padding.
struct ThdInput {
  at::Tensor input_ids{};     // [B, S], or embeddings [B, S, H]
  at::Tensor labels{};        // [B, S], or undefined
  at::Tensor position_ids{};  // [B, S] or of several axes [n, B, S], or undefined
  at::Tensor seq_lens{};      // integers [B, packs]: real tokens of each sequence, or undefined
  at::Tensor
      seq_lens_padded{};  // integers [B, packs]: real tokens and padding of each sequence; undefined: equal to seq_lens
};

struct ThdBatch {
  at::Tensor input_ids{};     // [B * S], or [B * S, H]
  at::Tensor labels{};        // [B * S]
  at::Tensor position_ids{};  // [B * S], or [n, 1, B * S]
  at::Tensor cu_seqlens{};    // int32 [sequences + 1], prefix sums of real lengths; undefined without lengths
  at::Tensor
      cu_seqlens_padded{};  // int32 [sequences + 1], prefix sums of padded lengths; undefined where equal to cu_seqlens
  int64_t max_seqlen = 0;   // the largest difference of cu_seqlens
  at::Tensor padding_mask{};  // bool [B * S]: true on padding, by the lengths; without lengths true where the
                              // token is padding_token_id
};

// Flattens the B rows of S tokens into one sequence of B * S tokens. ThdBatch::cu_seqlens has the prefix sums of the
// real lengths and ThdBatch::cu_seqlens_padded the prefix sums of the padded lengths. If padded lengths are given and
// the two lists of sums differ at most in their last sum, cu_seqlens ends with B * S and cu_seqlens_padded is
// undefined. Errors kShape: sizes of ids, labels, positions and lengths that do not fit; a padded length below its real
// length; lengths beyond a row; a row before the last that is not full, because all later offsets would be wrong; and,
// without lengths, embeddings in place of ids, or a padding token before another token.
ThdBatch process_input_for_thd(const ThdInput& input, const ThdOptions& options = {});

// The rows of a ThdInput, split into chunks: the results of process_input_for_thd() for all chunks, stacked.
struct ThdChunks {
  ThdBatch batch{};         // every tensor has a leading dim of chunks. cu_seqlens is [chunks, longest + 1], filled up
                            // with seq_lens_padding_value. If any chunk has a cu_seqlens_padded,
                            // batch.cu_seqlens_padded is defined, with the same shape
  at::Tensor max_seqlen{};  // int64 [chunks]; batch.max_seqlen is the largest
  int64_t chunks = 1;
};
// Splits the rows into num_chunks chunks of equal size. num_chunks <= 1 gives the result of process_input_for_thd(),
// without a dim of chunks. Errors kShape as above, and when num_chunks does not divide the number of rows.
ThdChunks split_batch_into_thd_chunks(const ThdInput& input, int64_t num_chunks, const ThdOptions& options = {});

// The input of attention_pattern: int64 [1, T], the document of each token and -1 on padding. Without lengths all
// tokens that are not padding are document 0.
at::Tensor thd_document_ids(const ThdBatch& batch);

}  // namespace tessera::data
