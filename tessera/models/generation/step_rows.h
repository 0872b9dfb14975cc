// One forward over tokens of several sequences, whose keys and values lie in pages.
//
//   const RowsForward forward = rows_forward(*model);
//   const std::vector<kernels::PagedTokens> sequences = {
//       {.first_row = 0, .rows = 2, .first_position = 0, .pages = first},
//       {.first_row = 2, .rows = 1, .first_position = 40, .pages = second}};
//   at::Tensor logits = forward(store, {.tokens = {7, 8, 3},                                               // [2, V]
//                                       .positions = {0, 1, 40}, .sequences = sequences, .wanted = {1, 2}});
//
// COLLECTIVE over the ranks that hold the model; shared_steps.h makes them all call it. Not differentiable. One thread
// at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "tessera/models/decoder/causal_lm.h"
#include "tessera/nn/attention/paged_cache.h"

namespace tessera {

struct StepRows {
  std::vector<int64_t> tokens{}, positions{};  // of each row
  std::vector<int64_t> rotary_lengths{};  // of each row, as in ModelInputs; empty unless the model's rope is dynamic
  std::vector<kernels::PagedTokens> sequences{};
  std::vector<int64_t> wanted{};  // rows whose logits count
};

// Computes the logits of the wanted rows: [wanted, V], float32 on the CPU. The result may be undefined on a rank that
// does not lead the others: a stage of a pipeline that is not the last has no logits.
using RowsForward = std::function<at::Tensor(nn::PageStore& store, const StepRows& rows)>;

// The forward of a model of which each rank runs all layers. The model must outlive it.
RowsForward rows_forward(CausalLM& model);

// The two halves of such a forward: the inputs of the model, and the logits as RowsForward gives them. `step` must
// outlive the inputs. Undefined logits stay undefined; those that lie over ranks are gathered (COLLECTIVE).
ModelInputs inputs_of_rows(const StepRows& rows, nn::PagedStep& step, at::Device device);
at::Tensor logits_of_rows(const at::Tensor& found);

}  // namespace tessera
