// Continuing a sequence of tokens with a model.
//
//   auto options = GenerationOptions::from_folder(dir, model->config());
//   options.stop_tokens = end_tokens(dir, model->config(), tokenizer, chat);                  // end_tokens.h
//   options.max_new_tokens = 40;
//   std::vector<int64_t> tokens = generate(*model, prompt, options);         // new tokens, the stop token included
//
// Greedy unless `sample` is set. A sampled token depends on the seed, its position and the logits only. Semantics and
// order of the filters as transformers' generate: repetition penalty, temperature, top-k, top-p, min-p.
// One sequence of an engine of its own (generation/engine.h), which several sequences at once use directly. Not
// thread-safe per model.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "tessera/comm/group/group.h"
#include "tessera/models/decoder/causal_lm.h"
#include "tessera/models/generation/step_rows.h"

namespace tessera::text {
class TokenConstraint;
}

namespace tessera {

struct GenerationOptions {
  int64_t max_new_tokens = 128;
  bool sample = false;
  double temperature = 1.0;
  int64_t top_k = 50;               // 0: all tokens
  double top_p = 1.0;               // the smallest set of tokens whose probability reaches it; 1: all
  double min_p = 0.0;               // tokens with less than this share of the likeliest one's probability go; 0: none
  double repetition_penalty = 1.0;  // also when greedy
  // Taken from the scores of tokens that were made since the prompt: once each, and for each time. Also when greedy.
  double presence_penalty = 0.0, frequency_penalty = 0.0;
  std::vector<std::pair<int64_t, float>> logit_bias{};  // added to the scores of these tokens first. Also when greedy
  // Of this one sequence: tokens that it does not allow never come, and the sequence ends where none may follow
  // (text/grammar/token_constraint.h).
  std::shared_ptr<text::TokenConstraint> constraint{};
  uint64_t seed = 0;
  std::vector<int64_t> stop_tokens{};
  int64_t context_tokens = 0;   // of prompt and new tokens together, at most; 0: what the model's config says
  bool folder_samples = false;  // generation_config.json asks for sampling; `sample` decides

  // Stop tokens and defaults of generation_config.json where DIR has one, else of the model's config. The stop tokens
  // are those that one of the two files lists; end_tokens.h has all at which a text of the model ends. `sample` stays
  // false whatever the file says: a caller that samples sets it. Settings that are not supported are named in a
  // warning. Error kFormat for text that is no JSON object, kConfig for values out of range.
  static GenerationOptions from_folder(const std::filesystem::path& dir, const ModelConfig& config);
  // Error kConfig for values out of range.
  void check() const;
};

// Sees each new token as it is made; false ends the generation.
using TokenCallback = std::function<bool(int64_t token)>;

// Ends with a stop token, after max_new_tokens, or when the model's context is full. Error kConfig for an empty prompt,
// one that fills the context, or ids outside the vocabulary. Of a sharded model all ranks generate the same: give their
// `group`, whose first rank makes the choices (and whose callback decides); COLLECTIVE over it then.
std::vector<int64_t> generate(CausalLM& model, std::span<const int64_t> prompt, const GenerationOptions& options,
                              const TokenCallback& on_token = {}, comm::Group* group = nullptr);

// What generates where no rank has the whole model: the stages of a pipeline.
struct GenerationSource {
  RowsForward forward{};         // gives the leader its logits
  at::Device device = at::kCPU;  // the model's
  comm::Group* group = nullptr;  // of all ranks that generate; null: one
  int leader = 0;                // its rank that chooses, and whose callback decides
};
// As above. COLLECTIVE over the source's group.
std::vector<int64_t> generate(const ModelConfig& config, const GenerationSource& source,
                              std::span<const int64_t> prompt, const GenerationOptions& options,
                              const TokenCallback& on_token = {});
// The tokens that the pages of it must hold, at most. Errors as generate's.
int64_t generation_capacity(const ModelConfig& config, std::span<const int64_t> prompt,
                            const GenerationOptions& options);

// The errors of generate for such a prompt: kConfig. context_tokens: as in GenerationOptions.
void check_prompt(const ModelConfig& config, std::span<const int64_t> prompt, int64_t context_tokens = 0);

// The choice among logits [V] after `context`, whose first tokens are the prompt; for tests and other samplers.
int64_t choose_token(const at::Tensor& logits, std::span<const int64_t> context, const GenerationOptions& options,
                     size_t prompt_tokens = 0);

}  // namespace tessera
