#include "tessera/models/generation/generate.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/log.h"
#include "tessera/base/text/json.h"
#include "tessera/comm/collectives/agreement.h"
#include "tessera/models/config/end_tokens.h"
#include "tessera/models/generation/engine.h"
#include "tessera/models/generation/engine_follower.h"
#include "tessera/models/generation/sampling.h"

namespace tessera {
namespace {

void warn_of_unsupported(const JsonReader& settings) {
  // Settings of generation_config.json that change transformers' result, each with the value at which it has no effect.
  static const std::pair<const char*, Json> kUnsupported[] = {{"num_beams", 1},
                                                              {"penalty_alpha", nullptr},
                                                              {"no_repeat_ngram_size", 0},
                                                              {"min_new_tokens", nullptr},
                                                              {"min_length", 0},
                                                              {"typical_p", 1.0},
                                                              {"epsilon_cutoff", 0.0},
                                                              {"eta_cutoff", 0.0},
                                                              {"bad_words_ids", nullptr},
                                                              {"suppress_tokens", nullptr},
                                                              {"begin_suppress_tokens", nullptr},
                                                              {"forced_bos_token_id", nullptr},
                                                              {"forced_eos_token_id", nullptr},
                                                              {"sequence_bias", nullptr}};
  // No warning is logged for an unsupported setting that has its neutral value, because such a setting has no effect.
  for (const auto& [key, neutral] : kUnsupported) {
    const auto found = settings.find(key);
    if (found && found->value() != neutral) log_warning("{}: not supported and not applied", found->name());
  }
}

int64_t context_of(const ModelConfig& config, int64_t requested) {
  return requested > 0 ? requested : config.context_tokens;
}

}  // namespace

void check_prompt(const ModelConfig& config, std::span<const int64_t> prompt, int64_t context_tokens) {
  const int64_t context = context_of(config, context_tokens);
  TESSERA_CHECK(!prompt.empty(), ErrorKind::kConfig,
                "[models.generate] the prompt holds no tokens. Pass a text that is not empty.");
  TESSERA_CHECK(static_cast<int64_t>(prompt.size()) < context, ErrorKind::kConfig,
                "[models.generate] the prompt has {} tokens, the context is {}. Shorten it, or raise --max-model-len.",
                prompt.size(), context);
  for (const int64_t token : prompt) {
    TESSERA_CHECK(0 <= token && token < config.vocab_size, ErrorKind::kConfig,
                  "[models.generate] token {} of the prompt is outside the model's vocabulary of {} tokens. Use the "
                  "model's own tokenizer.",
                  token, config.vocab_size);
  }
}

GenerationOptions GenerationOptions::from_folder(const std::filesystem::path& dir, const ModelConfig& config) {
  GenerationOptions options;
  options.stop_tokens = listed_end_tokens(dir, config);
  const auto path = dir / "generation_config.json";
  if (!std::filesystem::exists(path)) return options;
  constexpr JsonLimits kLimits{.max_bytes = 1 << 20, .max_depth = 32};
  constexpr double kMost = 1e30;
  const auto where = "[models.generate] " + path.string();
  const Json json = parse_json_object(read_file(path, kLimits.max_bytes), where, kLimits);
  const JsonReader settings(json, where, ErrorKind::kConfig);
  options.max_new_tokens = settings.integer("max_new_tokens", options.max_new_tokens, 1, int64_t{1} << 40);
  options.temperature = settings.number("temperature", options.temperature, 0, kMost);
  options.top_k = settings.integer("top_k", options.top_k, 0, int64_t{1} << 40);
  options.top_p = settings.number("top_p", options.top_p, 0, 1);
  options.min_p = settings.number("min_p", options.min_p, 0, 1);
  options.repetition_penalty = settings.number("repetition_penalty", options.repetition_penalty, 0, kMost);
  options.folder_samples = settings.boolean("do_sample", false) && options.temperature > 0;
  warn_of_unsupported(settings);
  if (options.temperature == 0) options.temperature = 1.0;  // some files express greedy decoding this way
  options.check();
  return options;
}

void GenerationOptions::check() const {
  const auto check_range = [](bool holds, const char* name, auto found, const char* range) {
    TESSERA_CHECK(holds, ErrorKind::kConfig, "[models.generate] {}: found {}, wanted {}", name, found, range);
  };
  check_range(max_new_tokens >= 1, "max_new_tokens", max_new_tokens, "at least 1");
  check_range(temperature > 0 && std::isfinite(temperature), "temperature", temperature, "a number above 0");
  check_range(context_tokens >= 0, "context_tokens", context_tokens, "0 or more");
  check_range(top_k >= 0, "top_k", top_k, "0 or more");
  check_range(top_p > 0 && top_p <= 1, "top_p", top_p, "a number above 0, at most 1");
  check_range(min_p >= 0 && min_p <= 1, "min_p", min_p, "a number from 0 to 1");
  check_range(std::abs(presence_penalty) <= 2, "presence_penalty", presence_penalty, "a number from -2 to 2");
  check_range(std::abs(frequency_penalty) <= 2, "frequency_penalty", frequency_penalty, "a number from -2 to 2");
  check_range(repetition_penalty > 0 && std::isfinite(repetition_penalty), "repetition_penalty", repetition_penalty,
              "a number above 0");
  for (const auto& [token, bias] : logit_bias) check_range(std::isfinite(bias), "logit_bias", bias, "a number");
}

int64_t choose_token(const at::Tensor& logits, std::span<const int64_t> context, const GenerationOptions& options,
                     size_t prompt_tokens) {
  const auto values = logits.detach().to(at::kCPU, at::kFloat).contiguous();
  std::vector<float> scores(values.const_data_ptr<float>(), values.const_data_ptr<float>() + values.numel());
  return choose_from_scores(scores, {.tokens = context, .prompt_tokens = prompt_tokens}, options);
}

// Returns the number of tokens of the prompt and of max_new_tokens together, but at most the context length.
int64_t generation_capacity(const ModelConfig& config, std::span<const int64_t> prompt,
                            const GenerationOptions& options) {
  check_prompt(config, prompt, options.context_tokens);
  options.check();
  const auto prompt_length = static_cast<int64_t>(prompt.size());
  return prompt_length + std::min(options.max_new_tokens, context_of(config, options.context_tokens) - prompt_length);
}

// Runs one sequence in its own engine. The leader runs the engine, and all other ranks call run_engine_follower.
// Afterwards the ranks exchange errors and the leader broadcasts the tokens, so that all ranks return the same tokens
// or throw the same error.
std::vector<int64_t> generate(const ModelConfig& config, const DistributedForward& distributed,
                              std::span<const int64_t> prompt, const GenerationOptions& options,
                              const TokenCallback& on_token) {
  // All ranks call generation_capacity() with equal arguments, so that it throws on all ranks or on none.
  const int64_t capacity = generation_capacity(config, prompt, options);
  auto* const group = distributed.group != nullptr && distributed.group->size() > 1 ? distributed.group : nullptr;
  std::vector<int64_t> new_tokens;
  // An error while the leader chose a token. It is thrown on all ranks after the engine has ended, so that no rank
  // waits in a collective. Only the leader chooses tokens, because logits may round differently on different ranks.
  std::exception_ptr failed;
  if (group != nullptr && group->rank() != distributed.leader) {
    run_engine_follower(config, distributed.forward, *group, distributed.leader);
  } else {
    Engine engine(config, distributed.forward, distributed.device,
                  {.pages = Engine::pages_for(capacity),
                   .prompt_block = static_cast<int64_t>(prompt.size()),
                   .group = std::shared_ptr<comm::Group>(std::shared_ptr<void>(), group)});  // not owned
    const auto on_new_token = [&](const NewToken& token) {
      if (token.error) {
        failed = std::make_exception_ptr(*token.error);
        return false;
      }
      new_tokens.push_back(token.token);
      try {
        return !on_token || on_token(token.token);
      } catch (...) {
        failed = std::current_exception();
        return false;
      }
    };
    engine.add({.prompt = {prompt.begin(), prompt.end()}, .options = options, .on_token = on_new_token});
    while (engine.step()) {
    }
  }
  const auto check = [&] {
    if (failed) std::rethrow_exception(failed);
  };
  if (group == nullptr) {
    check();
    return new_tokens;
  }
  comm::attempt_together(*group, check);
  return broadcast_numbers(*group, new_tokens, distributed.leader);
}

std::vector<int64_t> generate(CausalLM& model, std::span<const int64_t> prompt, const GenerationOptions& options,
                              const TokenCallback& on_token, comm::Group* group) {
  return generate(model.config(),
                  {.forward = rows_forward(model), .device = model.parameters().front().device(), .group = group},
                  prompt, options, on_token);
}

}  // namespace tessera
