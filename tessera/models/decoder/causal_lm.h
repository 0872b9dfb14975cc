// What every language model of Tessera offers, whatever its family.
//
//   auto model = make_model(ModelConfig::from_folder(dir), {.device = at::kMeta});
//   at::Tensor logits = model->logits({.tokens = tokens});                       // [B, T, V]
//   at::Tensor loss = model->loss_sum({.tokens = tokens}, labels);               // fp32 scalar
//
// Both go through the model's call operator, so that hooks on the model (FSDP's gathering of embedding, final norm and
// head) run around everything. Decoder layers are called by their own. Ownership and threads as nn::Module.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "tessera/models/config/config.h"
#include "tessera/nn/attention/paged_cache.h"
#include "tessera/nn/module.h"
#include "tessera/nn/options.h"

namespace tessera {

// A stage of a pipeline: some decoder layers in a row, the embedding before them where it is the first, norm and head
// behind them where it is the last.
struct StageRange {
  int64_t first_layer = 0, end_layer = 0;
  bool is_first = true, is_last = true;
};

struct ModelInputs {
  at::Tensor tokens{};        // int64 [B, T]
  at::Tensor positions{};     // int64 [B, T]; undefined: 0, 1, 2, ...
  at::Tensor document_ids{};  // int64 [B, T], a number for each document of a packed row, negative: padding, whose
                              // results mean nothing; undefined: one document a row
  at::Tensor labels{};   // int64 [B, T]: the token that follows each token, or kIgnoredLabel. Defined: forward gives
                         // the summed loss, undefined: the logits
  at::Tensor targets{};  // int64 [B, T]: as labels, without them; defined: forward gives log p of each, [B, T]
  // Of a paged step, int64 [B, T]: the length of each token's sequence in the call that computes it, for rotary
  // embeddings of the dynamic kind; undefined: that of this call
  at::Tensor rotary_lengths{};
  at::Tensor hidden{};  // [B, T, hidden_size]: what the stage before gave, of a stage that is not the first
  std::optional<StageRange> stage{};  // what to run; a stage that is not the last gives [B, T, hidden_size]. None: all
  nn::PagedStep* paged = nullptr;     // tokens [1, N] of several sequences, logits of the rows that it wants; positions
                                      // must be given. Not owned
  int64_t logits_to_keep = 0;         // logits of the last so many tokens of each row only; 0: of all
  bool tokens_are_text = false;       // check_text() has seen them; else a model that has image tokens looks itself

  template <class F>
  void visit_tensors(F&& visit) {
    for (auto* tensor : {&tokens, &positions, &document_ids, &labels, &targets, &rotary_lengths, &hidden}) {
      if (tensor->defined()) visit(*tensor);
    }
  }
};

// Error kConfig: tokens of the model that stand for an image, of which it has the text alone. Makes the host wait for
// tokens on an accelerator.
void check_text(const ModelConfig& config, const at::Tensor& tokens);

class CausalLM : public nn::Callable<CausalLM> {
 public:
  explicit CausalLM(ModelConfig config) : config_(std::move(config)) {}

  // Logits [B, T, V] in the model's dtype, or with labels their cross entropy summed, fp32, or what a stage gives. Call
  // it through operator().
  virtual at::Tensor forward(const ModelInputs& inputs) = 0;
  // The decoder layers that this rank has, in order: what parallel/ treats as units.
  virtual std::vector<std::shared_ptr<nn::Module>> blocks() = 0;

  at::Tensor logits(ModelInputs inputs);
  // The sum over the labels that are not kIgnoredLabel; never holds all logits.
  at::Tensor loss_sum(ModelInputs inputs, const at::Tensor& labels);
  // log p(target) of each position [B, T], float32 at least; 0 where the target is kIgnoredLabel. Never holds all
  // logits.
  at::Tensor logprobs(ModelInputs inputs, const at::Tensor& targets);
  const ModelConfig& config() const { return config_; }

 private:
  ModelConfig config_;
};

// A model of the configured family with uninitialised parameters. On the meta device it allocates nothing.
std::shared_ptr<CausalLM> make_model(const ModelConfig& config, const nn::ParameterOptions& options = {});

}  // namespace tessera
