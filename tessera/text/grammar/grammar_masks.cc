#include "tessera/text/grammar/grammar_masks.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"

namespace tessera::text {
namespace {

constexpr size_t kOwnMemoryBytes = size_t{64} << 20;
constexpr uint64_t kBytesOfAStep = 64;  // this many token bytes through known states cost as much as one step

}  // namespace

// Counts the steps of one call of look() against its limit.
class GrammarMasks::Slice {
 public:
  Slice(const GrammarStates& states, uint64_t steps) : states_(states), first_(states.steps()), steps_(steps) {}
  void count_byte() { ++token_bytes_; }
  uint64_t taken() const { return states_.steps() - first_ + token_bytes_ / kBytesOfAStep; }
  bool is_over() const { return taken() >= steps_; }

 private:
  const GrammarStates& states_;
  const uint64_t first_, steps_;
  uint64_t token_bytes_ = 0;
};

GrammarMasks::Search::Search(GrammarMasks& masks) : masks_(masks) {
  const std::lock_guard lock(masks_.mutex_);
  state_ = masks_.states_.start();
  masks_.searches_.insert(this);
}

GrammarMasks::Search::~Search() {
  const std::lock_guard lock(masks_.mutex_);
  masks_.searches_.erase(this);
}

GrammarMasks::GrammarMasks(Grammar grammar, std::shared_ptr<const SortedVocabulary> vocabulary,
                           std::shared_ptr<GrammarMemory> memory, uint64_t most_steps)
    : vocabulary_(std::move(vocabulary)),
      most_steps_(most_steps),
      account_(memory ? std::move(memory) : std::make_shared<GrammarMemory>(kOwnMemoryBytes), grammar.bytes()),
      states_(std::move(grammar)) {
  account_.set_states(held_bytes());
}

size_t GrammarMasks::held_bytes() const {
  return states_.bytes() + masks_.size() * (vocabulary_->size() / 8 + sizeof(TokenMask));
}

size_t GrammarMasks::bytes() const {
  const std::lock_guard lock(mutex_);
  return account_.part_bytes() + held_bytes();
}

// Drops all states except those in the searches, and all masks, because states get new numbers.
void GrammarMasks::forget_what_no_search_needs() {
  std::vector<int32_t*> needed;
  for (auto* search : searches_) {
    needed.push_back(&search->state_);
    for (auto& state : search->behind_) needed.push_back(&state);
  }
  masks_.clear();
  states_.keep(needed);
  kept_bytes_ = held_bytes();
}

// Moves the search's state behind the tokens. Returns false when the slice ends before. Fewer tokens than before mean
// another text, so the search starts again.
bool GrammarMasks::advance(Search& search, std::span<const int64_t> made, Slice& slice) {
  if (search.tokens_ > made.size()) {
    search.state_ = states_.start();
    search.tokens_ = search.bytes_ = 0;
    search.mask_ = nullptr;
  }
  while (search.tokens_ < made.size()) {
    search.mask_ = nullptr;
    const int64_t token = made[search.tokens_];
    const auto& bytes = vocabulary_->bytes(token);
    while (search.bytes_ < bytes.size()) {
      if (slice.is_over()) return false;
      search.state_ = states_.next(search.state_, static_cast<uint8_t>(bytes[search.bytes_++]));
    }
    TESSERA_CHECK(search.state_ != GrammarStates::kDead && !bytes.empty(), ErrorKind::kConfig,
                  "[text.grammar] token {} ({}) may not follow: the grammar of the answer does not allow it", token,
                  quote(bytes));
    ++search.tokens_;
    search.bytes_ = 0;
  }
  return true;
}

// Visits the tokens in the order of their bytes, like a depth-first walk through a trie. behind[i] is the state after i
// bytes of the last token that was read. The next token starts from the state after the bytes that it shares with this
// token, so a common prefix is read once; if this state is dead, the token is skipped without reading a byte.
// The walk continues in the next slice where this one ends. Finished masks are kept by state.
std::shared_ptr<const TokenMask> GrammarMasks::mask_of(Search& search, Slice& slice) {
  if (const auto known = masks_.find(search.state_); known != masks_.end()) return known->second;
  if (!search.mask_) {
    search.mask_ = std::make_shared<TokenMask>(vocabulary_->size());
    search.looked_at_ = 0;
    search.behind_ = {search.state_};
  }
  const auto& tokens = vocabulary_->tokens();
  auto& behind = search.behind_;
  for (; search.looked_at_ < tokens.size(); ++search.looked_at_) {
    const auto& token = tokens[search.looked_at_];
    // Skipped tokens leave `behind` as it is. It stays valid: all of them share at least the bytes up to its dead
    // state.
    behind.resize(std::min(behind.size(), token.shared + 1));
    while (behind.size() <= token.bytes.size() && behind.back() != GrammarStates::kDead) {
      if (slice.is_over()) return nullptr;
      slice.count_byte();
      behind.push_back(states_.next(behind.back(), static_cast<uint8_t>(token.bytes[behind.size() - 1])));
    }
    if (behind.back() != GrammarStates::kDead) (*search.mask_)[static_cast<size_t>(token.id)] = true;
  }
  std::shared_ptr<const TokenMask> mask = std::move(search.mask_);
  behind.clear();
  masks_.emplace(search.state_, mask);
  return mask;
}

std::optional<GrammarMasks::Answer> GrammarMasks::look(Search& search, std::span<const int64_t> made, Wanted wanted,
                                                       uint64_t steps) {
  const std::lock_guard lock(mutex_);
  // States are dropped only above half of the share (the other half is for the states of this call) and above twice the
  // size after the last drop, so the cost of dropping is amortized. Above the share they are always dropped.
  const size_t share = account_.memory().share();
  if (held_bytes() > std::min(share, std::max(share / 2, 2 * kept_bytes_))) forget_what_no_search_needs();
  TESSERA_CHECK(
      held_bytes() <= share, ErrorKind::kConfig,
      "[text.grammar] the states of the grammar take {} bytes, at most {} are allowed for one grammar. Make it "
      "simpler: fewer alternatives that begin alike.",
      held_bytes(), share);
  Slice slice(states_, std::min(steps, most_steps_ - search.spent_));
  const bool there = advance(search, made, slice);
  const auto mask = there && wanted == Wanted::kMask ? mask_of(search, slice) : nullptr;
  account_.set_states(held_bytes());
  if (there && (mask || wanted == Wanted::kPlace)) {
    search.spent_ = 0;
    return Answer{.mask = mask, .accepts = states_.accepts(search.state_), .ends = states_.ends(search.state_)};
  }
  search.spent_ = std::min(search.spent_ + slice.taken(), most_steps_);
  TESSERA_CHECK(search.spent_ < most_steps_, ErrorKind::kConfig,
                "[text.grammar] finding the tokens that may come next takes over {} steps. Make the grammar of the "
                "answer simpler: fewer alternatives that begin alike.",
                most_steps_);
  return std::nullopt;
}

}  // namespace tessera::text
