// Packed rows as one row of tokens with cumulative lengths ("THD"), as kernels for varying lengths take them.
//
//   const ThdBatch batch = process_input_for_thd({.input_ids = ids, .labels = labels, .position_ids = positions,
//                                                 .seq_lens = lens, .seq_lens_padded = padded});
//   batch.cu_seqlens;                                       // int32 [n + 1]: 0, 3, 5, 11
//   model->loss_sum({.tokens = batch.input_ids.unsqueeze(0), .document_ids = thd_document_ids(batch)}, ...);
//
// Semantics of NeMo AutoModel's thd_utils. Plain values on the host; no communication; thread-safe.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera::data {

struct ThdOptions {
  int64_t seq_lens_padding_value = -1000;  // entries of lengths that mean nothing
  int64_t padding_token_id = 0;
};

// Row by row: packed sequences one behind another, each followed by its own padding.
struct ThdInput {
  at::Tensor input_ids{};        // [B, S], or embeddings [B, S, H]
  at::Tensor labels{};           // [B, S], or undefined
  at::Tensor position_ids{};     // [B, S] or of several axes [n, B, S], or undefined
  at::Tensor seq_lens{};         // integers [B, packs]: real tokens of each sequence, or undefined
  at::Tensor seq_lens_padded{};  // the same with the padding behind each; undefined: as seq_lens
};

struct ThdBatch {
  at::Tensor input_ids{};          // [B * S], or [B * S, H]
  at::Tensor labels{};             // [B * S]
  at::Tensor position_ids{};       // [B * S], or [n, 1, B * S]
  at::Tensor cu_seqlens{};         // int32 [sequences + 1] of real lengths; undefined without lengths
  at::Tensor cu_seqlens_padded{};  // int32, of padded lengths, where that is not the same
  int64_t max_seqlen = 0;          // the largest difference of cu_seqlens
  at::Tensor padding_mask{};       // bool [B * S]: true on padding, by the lengths; without them where the token is
                                   // padding_token_id
};

// cu_seqlens has the prefix sums of the real lengths and cu_seqlens_padded those of the padded ones. Where padded
// lengths are given and no sum but the last is another, that one is B * S and there are no padded ones. Errors kShape:
// ids, labels, positions and lengths of sizes that do not fit; a padded length below its real one; lengths beyond a
// row, or rows but the last that are not full, as all that follows would be off; without lengths a padding token in
// front of another token.
ThdBatch process_input_for_thd(const ThdInput& input, const ThdOptions& options = {});

// One result a chunk of the rows, stacked.
struct ThdChunks {
  ThdBatch batch{};         // every tensor with a dim of chunks in front: cu_seqlens [chunks, most + 1], filled up with
                            // seq_lens_padding_value, cu_seqlens_padded likewise where a chunk has it
  at::Tensor max_seqlen{};  // int64 [chunks]; batch.max_seqlen is the largest
  int64_t chunks = 1;
};
// num_chunks <= 1: the plain result, without a dim of chunks. Errors kShape as above, and for chunks that do not divide
// the rows.
ThdChunks split_batch_into_thd_chunks(const ThdInput& input, int64_t num_chunks, const ThdOptions& options = {});

// int64 [1, T], the document of each token and -1 on padding: what attention_pattern takes. Of a batch without lengths
// all tokens that are no padding are document 0.
at::Tensor thd_document_ids(const ThdBatch& batch);

}  // namespace tessera::data
