// One forward pass over tokens of several sequences, whose keys and values are stored in pages.
//
//   const RowsForward forward = rows_forward(*model);
//   const std::vector<kernels::PagedSequence> sequences = {
//       {.first_row = 0, .rows = 2, .first_position = 0, .pages = first},
//       {.first_row = 2, .rows = 1, .first_position = 40, .pages = second}};
//   at::Tensor logits = forward(store, {.tokens = {7, 8, 3},                                               // [2, V]
//                                       .positions = {0, 1, 40}, .sequences = sequences, .logits_rows = {1, 2}});
//
// COLLECTIVE over the ranks that share the model: the leader's engine calls it, and run_engine_follower
// (engine_follower.h) calls it on the other ranks. Not differentiable. Not thread-safe.
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

// Returns a RowsForward that calls `model`. Each rank must have all layers of the model (no pipeline stages). The model
// must outlive the returned function.
RowsForward rows_forward(CausalLM& model);

// For callers that implement a RowsForward themselves (pipeline stages). inputs_of_rows returns the inputs of the
// model; `step` must outlive them. logits_of_rows converts the model's logits to the result of RowsForward. It returns
// undefined logits unchanged and all-gathers logits that are sharded over ranks (COLLECTIVE).
ModelInputs inputs_of_rows(const StepRows& rows, nn::PagedBatch& step, at::Device device);
at::Tensor logits_of_rows(const at::Tensor& model_logits);

}  // namespace tessera
