// Continues a sequence of tokens with a model.
//
//   auto options = GenerationOptions::from_folder(dir, model->config());
//   options.stop_tokens = end_tokens(dir, model->config(), tokenizer, chat);                  // end_tokens.h
//   options.max_new_tokens = 40;
//   std::vector<int64_t> tokens = generate(*model, prompt, options);         // new tokens, the stop token included
//
// Decoding is greedy unless `sample` is set. A sampled token depends only on the seed, its position and the logits. The
// filters have the semantics and the order of transformers' generate: repetition penalty, temperature, top-k, top-p,
// min-p. generate() runs one sequence in its own engine (generation/engine.h); use Engine directly for several
// sequences at once. Different threads must not use the same model at the same time.
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
  double top_p = 1.0;               // keep the smallest set of tokens whose probabilities reach this sum; 1: keep all
  double min_p = 0.0;               // drop tokens with less than this share of the largest probability; 0: keep all
  double repetition_penalty = 1.0;  // also when greedy
  // Subtracted from the scores of tokens that were generated after the prompt: presence_penalty once for each distinct
  // token, frequency_penalty once for each occurrence. Both also apply to greedy decoding.
  double presence_penalty = 0.0, frequency_penalty = 0.0;
  std::vector<std::pair<int64_t, float>> logit_bias{};  // added to the scores of these tokens first; also when greedy
  // Tokens that the constraint does not allow are never chosen, and the sequence ends when the constraint allows no
  // further token (text/grammar/token_constraint.h). A constraint object must not be shared by several sequences.
  std::shared_ptr<text::TokenConstraint> constraint{};
  uint64_t seed = 0;
  std::vector<int64_t> stop_tokens{};
  int64_t context_tokens = 0;   // maximum of prompt and new tokens together; 0: the context of the config
  bool folder_samples = false;  // generation_config.json asks for sampling; only `sample` takes effect

  // Reads generation_config.json of DIR, if the file exists. stop_tokens are the end tokens that this file or the
  // model's config lists; end_tokens() of end_tokens.h also finds end tokens that neither lists. `sample` stays false
  // even if the file has do_sample: a caller that samples must set it. Settings that are not supported are listed in a
  // warning. Errors: kFormat for text that is not a JSON object, kConfig for values out of range.
  static GenerationOptions from_folder(const std::filesystem::path& dir, const ModelConfig& config);
  // Checks the ranges of the numeric options. Error kConfig for the first value out of range; the message names the
  // option.
  void check() const;
};

// Called with each new token; returning false ends the generation.
using TokenCallback = std::function<bool(int64_t token)>;

// Returns the new tokens. Generation ends with a stop token, after max_new_tokens, or when the model's context is full.
// Error kConfig for an empty prompt, a prompt that fills the context, and ids outside the vocabulary. For a sharded
// model, all ranks that share the model must call generate() with their `group`: COLLECTIVE over the group. Rank 0 of
// the group chooses the tokens, only its `on_token` is called, and all ranks return the same tokens.
std::vector<int64_t> generate(CausalLM& model, std::span<const int64_t> prompt, const GenerationOptions& options,
                              const TokenCallback& on_token = {}, comm::Group* group = nullptr);

// The forward function with which generate() runs a model that has no CausalLM object for all layers on one rank, as
// with pipeline stages.
struct DistributedForward {
  RowsForward forward{};         // returns the logits on the leader
  at::Device device = at::kCPU;  // of the model
  comm::Group* group = nullptr;  // all ranks that generate; null: this rank alone
  int leader = 0;                // rank of the group that chooses tokens and calls its on_token
};
// Like generate() above, with distributed.forward in place of a model. COLLECTIVE over distributed.group.
std::vector<int64_t> generate(const ModelConfig& config, const DistributedForward& distributed,
                              std::span<const int64_t> prompt, const GenerationOptions& options,
                              const TokenCallback& on_token = {});
// Returns the length at which generate() ends the sequence at the latest, prompt included; the KV cache must hold this
// many tokens. Errors as generate().
int64_t generation_capacity(const ModelConfig& config, std::span<const int64_t> prompt,
                            const GenerationOptions& options);

// Throws the errors of generate() for this prompt: kConfig. `context_tokens` as in GenerationOptions.
void check_prompt(const ModelConfig& config, std::span<const int64_t> prompt, int64_t context_tokens = 0);

// Chooses the token after `context` from logits [V]. The first `prompt_tokens` tokens of `context` are the prompt. For
// tests and other samplers.
int64_t choose_token(const at::Tensor& logits, std::span<const int64_t> context, const GenerationOptions& options,
                     size_t prompt_tokens = 0);

}  // namespace tessera
