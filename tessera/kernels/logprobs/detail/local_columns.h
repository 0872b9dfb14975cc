// Columns of token ids in logits that hold a part of the vocabulary, and the checks of such ids.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/kernels/logprobs/vocab_shard.h"

namespace tessera::kernels::detail {

// Tells which of the ids [rows, K] a part of the vocabulary has, and in which columns of the part.
struct LocalColumns {
  LocalColumns(const at::Tensor& ids, const VocabShard& part);
  at::Tensor is_local;  // bool [rows, K]: the part has the id
  at::Tensor column;    // int64 [rows, K]: the local column; 0 where the part does not have the id
};

// Returns for each id the next id along the last dim, and kIgnoredLabel for the last one.
at::Tensor next_token_ids(const at::Tensor& ids);

// Error kShape unless ids are int64 of the logits' leading shape, or [leading shape, K] where `many` is true.
void check_ids(const char* verb, const at::Tensor& logits, const at::Tensor& ids, bool many);
// Checks that each id is a column of exactly one rank or is kIgnoredLabel. found [rows, K]: the number of ranks that
// have the id as a column. Error kShape for the first id that fails the check.
void check_owned_once(const char* verb, const at::Tensor& ids, const at::Tensor& found, const VocabShard& part);

}  // namespace tessera::kernels::detail
