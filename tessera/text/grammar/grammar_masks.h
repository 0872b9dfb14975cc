// Computes which tokens may come next in a text that must follow a grammar. All sequences that use the grammar share
// one GrammarMasks.
//
//   const auto masks = std::make_shared<GrammarMasks>(grammar, vocabulary);
//   GrammarMasks::GrammarCursor cursor(*masks);  // one per sequence
//   while (!masks->advance_and_mask(cursor, generated_tokens, GrammarMasks::ResultKind::kMask, steps)) ...
//
// A token is allowed if its bytes continue the text; special tokens have no bytes and are never allowed. The work for
// one result is counted in steps (positions of the grammar that are read, about 16 million per second), so a caller can
// spread it over several calls. A cursor that needs `most_steps` for one result fails with Error kConfig. GrammarMemory
// limits the memory: when the states and masks come near the share of one grammar (bytes_per_grammar), the states that
// no cursor needs are dropped. Thread-safe. A cursor belongs to one sequence and must be destroyed before the masks.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

#include "tessera/text/grammar/grammar_memory.h"
#include "tessera/text/grammar/grammar_states.h"
#include "tessera/text/grammar/sorted_vocabulary.h"

namespace tessera::text {

using TokenMask = std::vector<bool>;

class GrammarMasks {
 public:
  static constexpr uint64_t kMostSteps = 20'000'000;  // about one second

  // Error kConfig for a grammar that exceeds the limits of GrammarStates. Without `memory` the masks have their own
  // GrammarMemory of 64 MiB.
  GrammarMasks(Grammar grammar, std::shared_ptr<const SortedVocabulary> vocabulary,
               std::shared_ptr<GrammarMemory> memory = nullptr, uint64_t most_steps = kMostSteps);

  // The position of one sequence in the grammar, and the mask that is being computed for it.
  class GrammarCursor {
   public:
    explicit GrammarCursor(GrammarMasks& masks);
    ~GrammarCursor();
    GrammarCursor(const GrammarCursor&) = delete;
    GrammarCursor& operator=(const GrammarCursor&) = delete;

   private:
    friend class GrammarMasks;
    GrammarMasks& masks_;
    int32_t state_;            // the state after tokens_ tokens and bytes_ bytes of the next one
    size_t tokens_ = 0;        // number of tokens that have been read
    size_t bytes_ = 0;         // number of bytes of the next token that have been read
    uint64_t steps_used_ = 0;  // steps since the last answer
    // The unfinished mask for state_. It is computed for the first tokens_done_ tokens of the sorted vocabulary.
    // prefix_states_[i] is the state after i bytes of the last token whose bytes were read.
    std::shared_ptr<TokenMask> mask_{};
    size_t tokens_done_ = 0;
    std::vector<int32_t> prefix_states_{};
  };

  struct MaskResult {
    std::shared_ptr<const TokenMask> mask{};  // by token id: the token has bytes and may come next
    bool accepts = false, ends = false;       // accepts: the text is whole. ends: no byte may follow
  };
  enum class ResultKind { kPlace, kMask };  // kPlace: a MaskResult without mask
  // Reads the tokens of `generated_tokens` that the cursor has not read yet. With ResultKind::kMask then also computes
  // the mask of the tokens that may come next. One call takes about `steps` steps at most (GrammarStates::steps()).
  // Returns nullopt when more steps are needed; the next call then continues the work. Error kConfig for a token that
  // the grammar does not allow, when the calls for one result have taken `most_steps` steps (see the constructor), and
  // when the states of the grammar need too much memory.
  std::optional<MaskResult> advance_and_mask(GrammarCursor& cursor, std::span<const int64_t> generated_tokens,
                                             ResultKind result_kind, uint64_t steps);

  size_t bytes() const;

 private:
  class StepBudget;
  bool advance(GrammarCursor& cursor, std::span<const int64_t> generated_tokens, StepBudget& budget);
  std::shared_ptr<const TokenMask> mask_of(GrammarCursor& cursor, StepBudget& budget);
  void drop_unused_states();
  size_t used_bytes() const;

  const std::shared_ptr<const SortedVocabulary> vocabulary_;
  const uint64_t most_steps_;
  mutable std::mutex mutex_;
  GrammarMemory::Account account_;
  GrammarStates states_;
  std::unordered_map<int32_t, std::shared_ptr<const TokenMask>> masks_;
  std::set<GrammarCursor*> cursors_;
  size_t bytes_after_drop_ = 0;  // used_bytes() after states were last dropped
};

}  // namespace tessera::text
