#include "tessera/text/grammar/grammar_masks.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"

namespace tessera::text {
namespace {

constexpr size_t kOwnMemoryBytes = size_t{64} << 20;
constexpr uint64_t kBytesOfAStep = 64;  // this many token bytes through known states cost as much as one step

}  // namespace

// Counts the steps of one call of advance_and_mask() against its limit.
class GrammarMasks::StepBudget {
 public:
  StepBudget(const GrammarStates& states, uint64_t steps) : states_(states), first_(states.steps()), steps_(steps) {}
  void count_byte() { ++token_bytes_; }
  uint64_t taken() const { return states_.steps() - first_ + token_bytes_ / kBytesOfAStep; }
  bool is_over() const { return taken() >= steps_; }

 private:
  const GrammarStates& states_;
  const uint64_t first_, steps_;
  uint64_t token_bytes_ = 0;
};

GrammarMasks::GrammarCursor::GrammarCursor(GrammarMasks& masks) : masks_(masks) {
  const std::lock_guard lock(masks_.mutex_);
  state_ = masks_.states_.start();
  masks_.cursors_.insert(this);
}

GrammarMasks::GrammarCursor::~GrammarCursor() {
  const std::lock_guard lock(masks_.mutex_);
  masks_.cursors_.erase(this);
}

GrammarMasks::GrammarMasks(Grammar grammar, std::shared_ptr<const SortedVocabulary> vocabulary,
                           std::shared_ptr<GrammarMemory> memory, uint64_t most_steps)
    : vocabulary_(std::move(vocabulary)),
      most_steps_(most_steps),
      account_(memory ? std::move(memory) : std::make_shared<GrammarMemory>(kOwnMemoryBytes), grammar.bytes()),
      states_(std::move(grammar)) {
  account_.set_states(used_bytes());
}

size_t GrammarMasks::used_bytes() const {
  return states_.bytes() + masks_.size() * (vocabulary_->size() / 8 + sizeof(TokenMask));
}

size_t GrammarMasks::bytes() const {
  const std::lock_guard lock(mutex_);
  return account_.grammar_bytes() + used_bytes();
}

// Drops all states that no cursor needs. Also drops all masks: masks_ has them by state number, and the kept states get
// new numbers.
void GrammarMasks::drop_unused_states() {
  std::vector<int32_t*> needed;
  for (auto* cursor : cursors_) {
    needed.push_back(&cursor->state_);
    for (auto& state : cursor->prefix_states_) needed.push_back(&state);
  }
  masks_.clear();
  states_.keep(needed);
  bytes_after_drop_ = used_bytes();
}

// Reads the tokens that the cursor has not read yet, and updates the cursor's state. Returns false when the step budget
// is used up before all tokens are read. If the cursor has read more tokens than `generated_tokens` has, then
// `generated_tokens` belongs to another text, and the cursor is first reset to the start of the grammar.
bool GrammarMasks::advance(GrammarCursor& cursor, std::span<const int64_t> generated_tokens, StepBudget& budget) {
  if (cursor.tokens_ > generated_tokens.size()) {
    cursor.state_ = states_.start();
    cursor.tokens_ = cursor.bytes_ = 0;
    cursor.mask_ = nullptr;
  }
  while (cursor.tokens_ < generated_tokens.size()) {
    cursor.mask_ = nullptr;
    const int64_t token = generated_tokens[cursor.tokens_];
    const auto& bytes = vocabulary_->bytes(token);
    while (cursor.bytes_ < bytes.size()) {
      if (budget.is_over()) return false;
      cursor.state_ = states_.next(cursor.state_, static_cast<uint8_t>(bytes[cursor.bytes_++]));
    }
    TESSERA_CHECK(cursor.state_ != GrammarStates::kDead && !bytes.empty(), ErrorKind::kConfig,
                  "[text.grammar] token {} ({}) may not follow: the grammar of the answer does not allow it", token,
                  quote(bytes));
    ++cursor.tokens_;
    cursor.bytes_ = 0;
  }
  return true;
}

// Computes the mask for the cursor's state. Visits the tokens of the vocabulary in the order of their bytes, like a
// depth-first walk through a trie. prefix_states[i] is the state after i bytes of the last token whose bytes were read.
// The next token starts from the state after the prefix that it shares with this token, so a shared prefix is read
// once; if that state is dead, the token is skipped. When the step budget is used up, the result is null, and the next
// call continues at the same token. Finished masks are stored in masks_ by state.
std::shared_ptr<const TokenMask> GrammarMasks::mask_of(GrammarCursor& cursor, StepBudget& budget) {
  if (const auto known = masks_.find(cursor.state_); known != masks_.end()) return known->second;
  if (!cursor.mask_) {
    cursor.mask_ = std::make_shared<TokenMask>(vocabulary_->size());
    cursor.tokens_done_ = 0;
    cursor.prefix_states_ = {cursor.state_};
  }
  const auto& tokens = vocabulary_->tokens();
  auto& prefix_states = cursor.prefix_states_;
  for (; cursor.tokens_done_ < tokens.size(); ++cursor.tokens_done_) {
    const auto& token = tokens[cursor.tokens_done_];
    // prefix_states[i] is the state after i bytes of the last token whose bytes were read. It is also the state after i
    // bytes of the token before this one, even if that token was skipped: a skipped token begins with all the bytes
    // that `prefix_states` covers, the last of which leads to the dead state. So this token keeps the states of the
    // bytes that it shares with the token before it (common_prefix_bytes).
    prefix_states.resize(std::min(prefix_states.size(), token.common_prefix_bytes + 1));
    while (prefix_states.size() <= token.bytes.size() && prefix_states.back() != GrammarStates::kDead) {
      if (budget.is_over()) return nullptr;
      budget.count_byte();
      prefix_states.push_back(
          states_.next(prefix_states.back(), static_cast<uint8_t>(token.bytes[prefix_states.size() - 1])));
    }
    if (prefix_states.back() != GrammarStates::kDead) (*cursor.mask_)[static_cast<size_t>(token.id)] = true;
  }
  std::shared_ptr<const TokenMask> mask = std::move(cursor.mask_);
  prefix_states.clear();
  masks_.emplace(cursor.state_, mask);
  return mask;
}

std::optional<GrammarMasks::MaskResult> GrammarMasks::advance_and_mask(GrammarCursor& cursor,
                                                                       std::span<const int64_t> generated_tokens,
                                                                       ResultKind result_kind, uint64_t steps) {
  const std::lock_guard lock(mutex_);
  // The limit is GrammarMemory::bytes_per_grammar(). To amortize the cost, states are dropped only when used_bytes() is
  // above half of the limit and above twice its value after the last drop. The other half of the limit is for the
  // states that this call creates. When used_bytes() is above the limit, states are always dropped.
  const size_t limit = account_.memory().bytes_per_grammar();
  if (used_bytes() > std::min(limit, std::max(limit / 2, 2 * bytes_after_drop_))) drop_unused_states();
  TESSERA_CHECK(
      used_bytes() <= limit, ErrorKind::kConfig,
      "[text.grammar] the states of the grammar take {} bytes, at most {} are allowed for one grammar. Make it "
      "simpler: fewer alternatives that begin alike.",
      used_bytes(), limit);
  StepBudget budget(states_, std::min(steps, most_steps_ - cursor.steps_used_));
  const bool there = advance(cursor, generated_tokens, budget);
  const auto mask = there && result_kind == ResultKind::kMask ? mask_of(cursor, budget) : nullptr;
  account_.set_states(used_bytes());
  if (there && (mask || result_kind == ResultKind::kPlace)) {
    cursor.steps_used_ = 0;
    return MaskResult{.mask = mask, .accepts = states_.accepts(cursor.state_), .ends = states_.ends(cursor.state_)};
  }
  cursor.steps_used_ = std::min(cursor.steps_used_ + budget.taken(), most_steps_);
  TESSERA_CHECK(cursor.steps_used_ < most_steps_, ErrorKind::kConfig,
                "[text.grammar] finding the tokens that may come next takes over {} steps. Make the grammar of the "
                "answer simpler: fewer alternatives that begin alike.",
                most_steps_);
  return std::nullopt;
}

}  // namespace tessera::text
