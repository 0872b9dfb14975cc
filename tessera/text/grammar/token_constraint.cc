#include "tessera/text/grammar/token_constraint.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/quote.h"

namespace tessera::text {
namespace {

constexpr size_t kMostStateBytes = size_t{64} << 20;
constexpr size_t kMostMaskBytes = size_t{32} << 20;

}  // namespace

SortedVocabulary::SortedVocabulary(const Tokenizer& tokenizer)
    : place_(tokenizer.vocab_size(), -1), size_(tokenizer.vocab_size()) {
  for (size_t i = 0; i < size_; ++i) {
    const auto id = static_cast<TokenId>(i);
    if (tokenizer.is_special(id)) continue;
    if (auto bytes = tokenizer.token_bytes(id); !bytes.empty()) tokens_.push_back({std::move(bytes), id, 0});
  }
  std::sort(tokens_.begin(), tokens_.end(),
            [](const Token& a, const Token& b) { return a.bytes != b.bytes ? a.bytes < b.bytes : a.id < b.id; });
  for (size_t i = 0; i < tokens_.size(); ++i) {
    auto& token = tokens_[i];
    place_[static_cast<size_t>(token.id)] = static_cast<int32_t>(i);
    if (i == 0) continue;
    const auto& before = tokens_[i - 1].bytes;
    const auto ends = std::mismatch(before.begin(), before.end(), token.bytes.begin(), token.bytes.end());
    token.shared = static_cast<size_t>(ends.first - before.begin());
  }
}

const std::string& SortedVocabulary::bytes(int64_t id) const {
  static const std::string none;
  if (id < 0 || static_cast<size_t>(id) >= place_.size()) return none;
  const int32_t place = place_[static_cast<size_t>(id)];
  return place < 0 ? none : tokens_[static_cast<size_t>(place)].bytes;
}

GrammarMasks::GrammarMasks(Grammar grammar, std::shared_ptr<const SortedVocabulary> vocabulary)
    : grammar_(std::move(grammar)),
      vocabulary_(std::move(vocabulary)),
      states_(std::make_unique<GrammarStates>(grammar_)) {}

void GrammarMasks::forget() {
  states_ = std::make_unique<GrammarStates>(grammar_);
  masks_.clear();
  ++epoch_;
}

// Tokens are visited in the order of their bytes, with the states behind each byte of the last one: what two begin with
// is read once, and where it leads nowhere the others with it are passed over.
std::shared_ptr<const TokenMask> GrammarMasks::mask_of(int32_t state) {
  if (const auto found = masks_.find(state); found != masks_.end()) return found->second;
  auto mask = std::make_shared<TokenMask>(vocabulary_->size());
  std::vector<int32_t> behind = {state};  // behind so many bytes
  for (const auto& token : vocabulary_->tokens()) {
    // The last token that was read to an end, dead or not, has this beginning in common with all since.
    behind.resize(std::min(behind.size(), token.shared + 1));
    while (behind.size() <= token.bytes.size() && behind.back() != GrammarStates::kDead) {
      const auto byte = static_cast<uint8_t>(token.bytes[behind.size() - 1]);
      behind.push_back(states_->next(behind.back(), byte));
    }
    if (behind.back() != GrammarStates::kDead) (*mask)[static_cast<size_t>(token.id)] = true;
  }
  if ((masks_.size() + 1) * vocabulary_->size() / 8 > kMostMaskBytes) masks_.clear();
  masks_.emplace(state, mask);
  return mask;
}

GrammarMasks::Answer GrammarMasks::look(Place& place, std::span<const int64_t> made, bool with_mask) {
  const std::lock_guard lock(mutex_);
  if (states_->bytes() > kMostStateBytes) forget();
  if (place.epoch != epoch_ || place.tokens > made.size()) place = {.state = states_->start(), .epoch = epoch_};
  for (; place.tokens < made.size(); ++place.tokens) {
    const int64_t token = made[place.tokens];
    for (const char byte : vocabulary_->bytes(token)) {
      place.state = states_->next(place.state, static_cast<uint8_t>(byte));
    }
    TESSERA_CHECK(place.state != GrammarStates::kDead && !vocabulary_->bytes(token).empty(), ErrorKind::kConfig,
                  "[text.grammar] token {} ({}) may not follow: the grammar of the answer does not take it", token,
                  quote(vocabulary_->bytes(token)));
  }
  return {.mask = with_mask ? mask_of(place.state) : nullptr,
          .accepts = states_->accepts(place.state),
          .ends = states_->ends(place.state)};
}

TokenMask TokenConstraint::allowed(std::span<const int64_t> made) {
  const auto answer = masks_->look(place_, made, true);
  auto mask = *answer.mask;
  for (const int64_t token : stop_tokens_) {
    if (token >= 0 && static_cast<size_t>(token) < mask.size()) mask[static_cast<size_t>(token)] = answer.accepts;
  }
  TESSERA_CHECK(std::find(mask.begin(), mask.end(), true) != mask.end(), ErrorKind::kConfig,
                "[text.grammar] no token of the vocabulary may come after {} tokens: the grammar of the answer wants "
                "bytes that it lacks",
                made.size());
  return mask;
}

bool TokenConstraint::complete(std::span<const int64_t> made) {
  const auto answer = masks_->look(place_, made, false);
  return answer.accepts && answer.ends;
}

}  // namespace tessera::text
