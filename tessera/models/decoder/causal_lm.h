// The interface of every language model, for all families.
//
//   auto model = make_model(ModelConfig::from_folder(dir), {.device = at::kMeta});
//   at::Tensor logits = model->logits({.tokens = tokens});                       // [B, T, V]
//   at::Tensor loss = model->loss_sum({.tokens = tokens}, labels);               // fp32 scalar
//
// logits() and loss_sum() go through the model's call operator, so hooks on the model (for example FSDP's all-gather of
// embedding, final norm and head) run around the whole forward. Decoder layers are called through their own call
// operators. The rules of nn::Module for ownership and threads apply.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "tessera/models/config/config.h"
#include "tessera/nn/attention/paged_cache.h"
#include "tessera/nn/module.h"
#include "tessera/nn/options.h"

namespace tessera {

// A pipeline stage: consecutive decoder layers. The first stage also has the embedding, and the last stage the final
// norm and the head.
struct StageRange {
  int64_t first_layer = 0, end_layer = 0;
  bool is_first = true, is_last = true;
};

struct ModelInputs {
  at::Tensor tokens{};     // int64 [B, T]
  at::Tensor positions{};  // int64 [B, T]; undefined: 0, 1, 2, ...
  // int64 [B, T]: the number of each token's document in a packed row. Negative: padding, whose results have no
  // meaning. Undefined: one document per row.
  at::Tensor document_ids{};
  // int64 [B, T]: the token that follows each token, or kIgnoredLabel. Defined: forward returns the summed loss.
  // Undefined: forward returns the logits.
  at::Tensor labels{};
  // int64 [B, T]: a token id for each position, or kIgnoredLabel. If targets are defined (and labels are not), forward
  // returns the log-probability of each target, [B, T].
  at::Tensor targets{};
  // int64 [B, T], for a paged step with the rope type "dynamic": for each token, the sequence length from which its
  // rotary angles are computed. Undefined: the largest position of this call plus 1.
  at::Tensor rotary_lengths{};
  at::Tensor hidden{};  // [B, T, hidden_size]: output of the previous stage, for a stage that is not the first
  // The stage to run; nullopt runs the whole model. A stage that is not the last returns [B, T, hidden_size].
  std::optional<StageRange> stage{};
  // Set for a paged step: `tokens` [1, N] then belong to several sequences with a paged KV cache, and forward returns
  // the logits of the rows that the PagedBatch requests. positions must be set. Not owned.
  nn::PagedBatch* paged = nullptr;
  int64_t logits_to_keep = 0;  // forward returns the logits of this many last tokens of each row; 0: of all tokens
  // True: the caller has called check_no_image_tokens() for the tokens. False: the forward of a model with image tokens
  // calls it.
  bool image_tokens_checked = false;

  template <class F>
  void visit_tensors(F&& visit) {
    for (auto* tensor : {&tokens, &positions, &document_ids, &labels, &targets, &rotary_lengths, &hidden}) {
      if (tensor->defined()) visit(*tensor);
    }
  }
};

// Checks that `tokens` contains no image placeholder token (ModelConfig::image_token_ids). Throws Error kConfig if it
// contains one, because this version implements only the text tower of models with images. With tokens on an
// accelerator the host waits for the device.
void check_no_image_tokens(const ModelConfig& config, const at::Tensor& tokens);

class CausalLM : public nn::Callable<CausalLM> {
 public:
  explicit CausalLM(ModelConfig config) : config_(std::move(config)) {}

  // Returns the logits [B, T, V] in the model's dtype; with labels the summed cross entropy in fp32; with targets their
  // log-probs; for a pipeline stage its output. Call it through operator().
  virtual at::Tensor forward(const ModelInputs& inputs) = 0;
  // Returns the decoder layers on this rank, in order. The functions of parallel/ apply FSDP and activation
  // checkpointing to each of these layers.
  virtual std::vector<std::shared_ptr<nn::Module>> blocks() = 0;

  at::Tensor logits(ModelInputs inputs);
  // Returns the cross entropy, summed over all labels except kIgnoredLabel. The logits are computed in chunks and never
  // all in memory.
  at::Tensor loss_sum(ModelInputs inputs, const at::Tensor& labels);
  // Returns log p(target) of each position, [B, T], in float32 or wider; 0 where the target is kIgnoredLabel. The
  // logits are computed in chunks and never all in memory.
  at::Tensor logprobs(ModelInputs inputs, const at::Tensor& targets);
  const ModelConfig& config() const { return config_; }

 private:
  ModelConfig config_;
};

// Makes a model of the configured family with uninitialised parameters. On the meta device it allocates nothing.
std::shared_ptr<CausalLM> make_model(const ModelConfig& config, const nn::ParameterOptions& options = {});

}  // namespace tessera
