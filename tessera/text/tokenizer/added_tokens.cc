#include "tessera/text/tokenizer/added_tokens.h"

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/text/tokenizer/unicode.h"

namespace tessera::text {
namespace {

constexpr size_t kMaxContentBytes = 4096;

// Whether the character before position `at` (word_before) or the one at `at` (word_after) is a word character. A
// `single_word` token must not be next to a word character.
bool word_before(std::string_view text, size_t at) {
  return at > 0 && (char_class(decode_utf8(previous_char(text.data() + at)).code) & kWord);
}
bool word_after(std::string_view text, size_t at) {
  return at < text.size() && (char_class(decode_utf8(text.data() + at).code) & kWord);
}
bool is_space(const char* p) { return char_class(decode_utf8(p).code) & kSpace; }

AddedToken read_token(const JsonReader& node) {
  AddedToken token;
  token.content = node.string("content");
  if (token.content.size() > kMaxContentBytes) {
    node.at("content").fail("a string of " + std::to_string(token.content.size()) + " bytes", "at most 4096");
  }
  node.at("id").as_unsigned();
  token.single_word = node.boolean("single_word");
  token.lstrip = node.boolean("lstrip");
  token.rstrip = node.boolean("rstrip");
  token.normalized = node.boolean("normalized");
  token.special = node.boolean("special");
  return token;
}

}  // namespace

void AddedMatcher::add(std::string_view pattern, const AddedToken& token) {
  if (!pattern.empty()) tokens_.try_emplace(std::string(pattern), token);
}

// Builds the radix tree of all patterns, then searches for each pattern in it, which gives the place (RadixTree::Place)
// at which the pattern ends.
void AddedMatcher::build() {
  std::vector<std::string_view> patterns;
  for (const auto& [pattern, token] : tokens_) patterns.push_back(pattern);
  tree_ = RadixTree(std::move(patterns));
  first_bytes_ = tree_.next_bytes(RadixTree::kRoot);
  for (auto& [pattern, token] : tokens_) {
    RadixTree::Place end = RadixTree::kNoNode;
    longest(pattern, 0, end);
    at_end_.emplace(end, std::move(token));
  }
  tokens_.clear();
}

size_t AddedMatcher::longest(std::string_view text, size_t at, RadixTree::Place& end) const {
  size_t best = 0;
  auto place = RadixTree::kRoot;
  for (size_t i = at; i < text.size(); ++i) {
    place = tree_.next(place, static_cast<uint8_t>(text[i]));
    if (place == RadixTree::kNoNode) break;
    if (!tree_.is_end(place)) continue;
    best = i + 1 - at;
    end = place;
  }
  return best;
}

bool AddedTokenFilter::accepts(const AddedToken& token, size_t begin, size_t end) const {
  if (token.special && !parse_special) return false;
  if (barriers.empty()) return true;
  const size_t from = origins ? origins[begin].begin : begin, to = origins ? origins[end - 1].end : end;
  const auto next = std::ranges::upper_bound(barriers, from);
  return next == barriers.end() || *next >= to;
}

std::vector<std::pair<size_t, size_t>> AddedMatcher::find_all(std::string_view text) const {
  std::vector<std::pair<size_t, size_t>> found;
  RadixTree::Place end_place = RadixTree::kNoNode;
  for (size_t at = 0; at < text.size() && !empty(); ++at) {
    const size_t length = may_begin_with(text[at]) ? longest(text, at, end_place) : 0;
    if (length > 0) found.emplace_back(at, at + length);
  }
  return found;
}

// Scans from left to right. A rejected match is skipped as a whole, as in the `tokenizers` library, so no shorter or
// later match inside its bytes is tried. The range of an `lstrip` token includes the whitespace before it, and that of
// an `rstrip` token the whitespace after it, but no bytes of an earlier token.
void AddedMatcher::split(std::string_view text, const AddedTokenFilter& filter, std::vector<TextSegment>& parts) const {
  parts.clear();
  const auto part = [&](size_t begin, size_t end, int32_t id) {
    parts.push_back({{static_cast<uint32_t>(begin), static_cast<uint32_t>(end)}, id});
  };
  size_t done = 0;  // text[0, done) is covered by `parts`
  RadixTree::Place end_place = RadixTree::kNoNode;
  for (size_t at = 0; at < text.size() && !empty();) {
    const size_t length = may_begin_with(text[at]) ? longest(text, at, end_place) : 0;
    if (length == 0) {
      ++at;
      continue;
    }
    size_t begin = at, end = at + length;
    at = end;
    const AddedToken& token = at_end_.find(end_place)->second;
    if (!filter.accepts(token, begin, end)) continue;
    if (token.single_word && (word_before(text, begin) || word_after(text, end))) continue;
    if (token.lstrip) {
      while (begin > done && is_space(previous_char(text.data() + begin))) {
        begin = static_cast<size_t>(previous_char(text.data() + begin) - text.data());
      }
      begin = std::max(begin, done);
    }
    if (token.rstrip) {
      while (end < text.size() && is_space(text.data() + end)) end += utf8_length(text[end]);
    }
    if (begin >= end) continue;  // an earlier rstrip token has all bytes of this match
    if (done < begin) part(done, begin, TextSegment::kText);
    part(begin, end, token.id);
    done = end;
  }
  if (done < text.size()) part(done, text.size(), TextSegment::kText);
}

// Follows AddedVocabulary::add_tokens of the `tokenizers` library, so that ids and precedence agree: special tokens are
// matched before other tokens with the same pattern, and the last token that is listed for an id gives its flags.
AddedTokens::AddedTokens(const JsonReader& root, std::span<const AddedToken> named, const TokenTable& vocab,
                         const Normalizer& normalizer) {
  std::vector<AddedToken> special, plain;
  std::unordered_map<int32_t, AddedToken> by_id;
  int64_t largest = -1;  // the largest id of an added token so far
  std::vector<AddedToken> tokens;
  if (root.has("added_tokens")) {
    for (const auto& item : root.at("added_tokens").items()) tokens.push_back(read_token(item));
  }
  tokens.insert(tokens.end(), named.begin(), named.end());
  if (tokens.empty()) return;
  for (const auto& token : tokens) {
    if (token.special && !token.content.empty() && special_.insert(token.content).second) special.push_back(token);
  }
  for (auto& token : tokens) {
    if (token.content.empty()) continue;
    const auto added = ids_.find(token.content);
    token.id = added != ids_.end() ? added->second : vocab.find(token.content);
    if (added != ids_.end() && by_id.at(token.id) == token) continue;
    const auto vocab_size = static_cast<int64_t>(vocab.distinct());
    if (token.id == TokenTable::kNone) {
      token.id = static_cast<int32_t>(largest >= vocab_size || vocab_size == 0 ? largest + 1 : vocab_size);
    }
    largest = std::max<int64_t>(largest, token.id);
    ids_[token.content] = token.id;
    by_id[token.id] = token;
    if (!special_.contains(token.content)) plain.push_back(token);
  }
  // The matchers keep the first of equal patterns, so special tokens are added first.
  NormalizeScratch scratch;
  const auto normalize = [&](const std::string& content) {
    AlignedText text;
    text.text = content;
    normalizer.apply(text, scratch);
    return text.text;
  };
  for (const auto& [id, token] : by_id) strings_[id] = token.normalized ? normalize(token.content) : token.content;
  special.insert(special.end(), plain.begin(), plain.end());
  for (const AddedToken& listed : special) {
    AddedToken token = by_id.at(ids_.at(listed.content));  // has the flags of the last token listed for this id
    token.special = special_.contains(token.content);
    if (token.special) special_token_matcher_.add(token.content, token);
    all_token_matcher_.add(token.content, token);
    if (listed.normalized) {
      normalized_.add(normalize(listed.content), token);
    } else {
      raw_.add(listed.content, token);
    }
  }
  raw_.build();
  normalized_.build();
  special_token_matcher_.build();
  all_token_matcher_.build();
}

}  // namespace tessera::text
