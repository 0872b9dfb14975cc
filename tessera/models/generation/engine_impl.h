// The sequences and steps of an Engine, for engine.cc and engine_tokens.cc.
#pragma once

#include <optional>
#include <vector>

#include "tessera/models/generation/engine.h"

namespace tessera {

// The token that is being chosen for a sequence.
struct PendingToken {
  NewToken new_token{};
  // True: the token is chosen, but it is not known yet whether the constraint is complete, because the mask for the
  // following token is not ready.
  bool has_token = false;
  std::vector<float> logits{};  // kept while the choice waits for a mask
};

struct Engine::Sequence {
  int64_t id = 0;
  GenerationRequest request{};
  std::vector<int64_t> tokens{};  // the prompt and the generated tokens
  int64_t max_tokens = 0;         // length at which the sequence ends
  std::vector<int32_t> pages{};
  int64_t computed_tokens = 0;                         // tokens whose keys and values are in pages
  int64_t published_pages = 0;                         // number of published pages
  PagePool::PrefixId prefix = PagePool::kEmptyPrefix;  // the prefix that ends with the published pages
  std::vector<TokenLogProbs> scores{};          // log-probs of the prompt's tokens from the second on, if requested
  int64_t scored = 0;                           // number of computed scores
  std::optional<PendingToken> pending_token{};  // while it is set, nothing else is computed for the sequence

  int64_t to_score() const {
    return request.log_probs && request.prompt_log_probs ? static_cast<int64_t>(request.prompt.size()) - 1 : 0;
  }
  int64_t pending() const { return static_cast<int64_t>(tokens.size()) - computed_tokens; }
  std::span<const int64_t> page_tokens(int64_t page) const {
    return std::span(tokens).subspan(static_cast<size_t>(page * kernels::kPageTokens), kernels::kPageTokens);
  }
};

struct Engine::EngineStep {
  struct SequenceRows {
    Sequence* sequence;
    int64_t rows;

    int64_t first() const { return sequence->computed_tokens; }
    int64_t end() const { return sequence->computed_tokens + rows; }
    // Returns the positions whose logits are needed: each position that predicts a prompt token whose log-prob was
    // requested, and the position that predicts the next new token.
    std::vector<int64_t> logits_positions() const {
      std::vector<int64_t> positions;
      const int64_t scored_end = std::min(end(), sequence->to_score());
      for (int64_t at = std::max(first(), sequence->scored); at < scored_end; ++at) positions.push_back(at);
      if (rows == sequence->pending()) positions.push_back(end() - 1);
      return positions;
    }
  };
  std::vector<SequenceRows> parts{};
};

// The logits at one position. They give the log-prob of the next prompt token, or they are used to choose a new token.
struct Engine::LogitsRow {
  Sequence* sequence;
  size_t position;
  bool chooses;
  bool chosen = false;
  std::optional<Error> error{};  // set when the logits give no score
};

}  // namespace tessera
