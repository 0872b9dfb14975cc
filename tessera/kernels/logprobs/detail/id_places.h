// Ids of tokens beside logits of which a rank has some columns.
#pragma once

#include <ATen/core/Tensor.h>

#include "tessera/kernels/logprobs/vocab_part.h"

namespace tessera::kernels::detail {

// Where ids [rows, K] stand among a part's columns.
struct IdPlaces {
  IdPlaces(const at::Tensor& ids, const VocabPart& part);
  at::Tensor own;    // bool: it is one of them
  at::Tensor place;  // which; 0 where it is none
};

// The id after each along the last dim; kIgnoredLabel behind the last.
at::Tensor following_ids(const at::Tensor& ids);

// Error kShape unless ids are int64 of the logits' leading shape, with a last dim of their own when there are `many`.
void check_ids(const char* verb, const at::Tensor& logits, const at::Tensor& ids, bool many);
// found [rows, K]: how many ranks have each id. Error kShape unless that is 1 or the id kIgnoredLabel.
void check_found(const char* verb, const at::Tensor& ids, const at::Tensor& found, const VocabPart& part);

}  // namespace tessera::kernels::detail
