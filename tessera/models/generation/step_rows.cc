#include "tessera/models/generation/step_rows.h"

#include <ATen/ATen.h>

#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {

ModelInputs inputs_of_rows(const StepRows& rows, nn::PagedBatch& step, at::Device device) {
  const auto row = [&](const std::vector<int64_t>& values) {
    return at::tensor(values, at::kLong).unsqueeze(0).to(device);
  };
  return {.tokens = row(rows.tokens),
          .positions = row(rows.positions),
          .rotary_lengths = rows.rotary_lengths.empty() ? at::Tensor() : row(rows.rotary_lengths),
          .paged = &step};
}

at::Tensor logits_of_rows(const at::Tensor& model_logits) {
  if (!model_logits.defined()) return model_logits;
  // With a tensor-parallel head, each rank has the logits of a shard of the vocabulary, so all-gather them.
  const auto logits = is_dtensor(model_logits) ? full_tensor(model_logits) : model_logits;
  return logits.to(at::kCPU, at::kFloat).reshape({-1, logits.size(-1)}).contiguous();
}

RowsForward rows_forward(CausalLM& model) {
  return [&model, device = model.parameters().front().device()](nn::PagedKVCache& store, const StepRows& rows) {
    const at::NoGradGuard no_grad;
    nn::PagedBatch step(store, rows.sequences, rows.logits_rows);
    return logits_of_rows(model.logits(inputs_of_rows(rows, step, device)));
  };
}

}  // namespace tessera
