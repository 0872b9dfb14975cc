// One forward pass over tokens of several sequences, whose keys and values are stored in pages.
//
//   const RowsForward forward = rows_forward(*model);
//   const std::vector<kernels::PagedSequence> sequences = {
//       {.first_row = 0, .rows = 2, .first_position = 0, .pages = first},
//       {.first_row = 2, .rows = 1, .first_position = 40, .pages = second}};
//   at::Tensor logits = forward(store, {.tokens = {7, 8, 3},                                               // [2, V]
//                                       .positions = {0, 1, 40}, .sequences = sequences, .logits_rows = {1, 2}});
//
// COLLECTIVE over the ranks that share the model; engine_follower.h makes all of them call it. Not differentiable. One
// thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "tessera/models/decoder/causal_lm.h"
#include "tessera/nn/attention/paged_cache.h"

namespace tessera {

struct StepRows {
  std::vector<int64_t> tokens{}, positions{};  // for each row
  std::vector<int64_t> rotary_lengths{};  // for each row, as in ModelInputs; empty unless the model's rope is dynamic
  std::vector<kernels::PagedSequence> sequences{};
  std::vector<int64_t> logits_rows{};  // rows whose logits are returned
};

// Computes the logits of rows.logits_rows: [logits_rows, V], float32 on the CPU. On a rank that is not the leader the
// result may be undefined: a pipeline stage that is not the last has no logits.
using RowsForward = std::function<at::Tensor(nn::PagedKVCache& store, const StepRows& rows)>;

// Returns the forward of a model of which each rank runs all layers. The model must outlive it.
RowsForward rows_forward(CausalLM& model);

// The two halves of a RowsForward, for callers that run the model themselves (pipeline stages): the inputs of the
// model, and the conversion of its logits to the result of RowsForward. `step` must outlive the inputs. Undefined
// logits stay undefined; logits that are sharded over ranks are all-gathered (COLLECTIVE).
ModelInputs inputs_of_rows(const StepRows& rows, nn::PagedBatch& step, at::Device device);
at::Tensor logits_of_rows(const at::Tensor& model_logits);

}  // namespace tessera
