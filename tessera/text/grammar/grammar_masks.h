// Which tokens may come next in the texts of a grammar, for all sequences that have this form.
//
//   const auto masks = std::make_shared<GrammarMasks>(grammar, vocabulary);
//   GrammarMasks::Search search(*masks);                                            // of one sequence
//   while (!masks->look(search, made, GrammarMasks::Wanted::kMask, steps)) ...     // a slice of the work each time
//
// Tokens are what their bytes are; special tokens are none. What an answer costs is counted in steps, places of the
// grammar that are read, so that callers can do the work in slices: about 16 million of them a second. A search that
// takes `most_steps` for one answer fails. Memory is that of GrammarMemory: states that no search is at are forgotten
// when the grammar has more than its share. Thread-safe; a search is its sequence's, and does not outlive the masks.
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
  static constexpr uint64_t kMostSteps = 20'000'000;  // about a second

  // Error kConfig for grammars that GrammarStates does not take. Without a memory the masks have one of 64 MiB.
  GrammarMasks(Grammar grammar, std::shared_ptr<const SortedVocabulary> vocabulary,
               std::shared_ptr<GrammarMemory> memory = nullptr, uint64_t most_steps = kMostSteps);

  // How far a sequence is, and the mask that is being made for it.
  class Search {
   public:
    explicit Search(GrammarMasks& masks);
    ~Search();
    Search(const Search&) = delete;
    Search& operator=(const Search&) = delete;

   private:
    friend class GrammarMasks;
    GrammarMasks& masks_;
    int32_t state_;
    size_t tokens_ = 0;   // that led to the state
    size_t bytes_ = 0;    // of the next token, that are part of the way
    uint64_t spent_ = 0;  // steps, since the last answer
    // The mask of the state, as far as it is made: tokens that were looked at, and the states behind each byte of the
    // last one.
    std::shared_ptr<TokenMask> mask_{};
    size_t looked_at_ = 0;
    std::vector<int32_t> behind_{};
  };

  struct Answer {
    std::shared_ptr<const TokenMask> mask{};  // of tokens with a text
    bool accepts = false, ends = false;       // the text is whole; and nothing may follow
  };
  enum class Wanted { kPlace, kMask };
  // Goes on with the search for at most about so many steps. Nothing where they were too few. Error kConfig for tokens
  // that the grammar does not take, and where the search has taken `most_steps` or too much memory.
  std::optional<Answer> look(Search& search, std::span<const int64_t> made, Wanted wanted, uint64_t steps);

  size_t bytes() const;

 private:
  class Slice;
  bool advance(Search& search, std::span<const int64_t> made, Slice& slice);
  std::shared_ptr<const TokenMask> mask_of(Search& search, Slice& slice);
  void forget_what_no_search_needs();
  size_t held_bytes() const;

  const std::shared_ptr<const SortedVocabulary> vocabulary_;
  const uint64_t most_steps_;
  mutable std::mutex mutex_;
  GrammarMemory::Account account_;
  GrammarStates states_;
  std::unordered_map<int32_t, std::shared_ptr<const TokenMask>> masks_;
  std::set<Search*> searches_;
  size_t kept_bytes_ = 0;  // after states were last forgotten
};

}  // namespace tessera::text
