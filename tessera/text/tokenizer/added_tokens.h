// Added tokens: strings that the tokenizer finds in the text before normalization (or after it, for tokens that are
// `normalized`), and that become one id each.
//
//   AddedTokens added(file.root(), named, vocab, normalizer);
//   added.raw().split(text, {.parse_special = true}, parts);
//   for (const TextSegment& part : parts) part.id == TextSegment::kText ? ... : ...
//
// Immutable, thread-safe.
#pragma once

#include <bitset>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "tessera/text/tokenizer/normalizer.h"
#include "tessera/text/tokenizer/radix_tree.h"
#include "tessera/text/tokenizer/token_table.h"

namespace tessera::text {

struct AddedToken {
  std::string content;
  int32_t id = 0;
  bool single_word = false, lstrip = false, rstrip = false, normalized = false, special = false;
  bool operator==(const AddedToken&) const = default;
};

struct TextSegment {
  static constexpr int32_t kText = -1;
  Span span;
  int32_t id;
};

// Selects which of the matched tokens become ids (see EncodeOptions); the other ones stay text.
struct AddedTokenFilter {
  bool parse_special = true;
  std::span<const size_t> barriers{};  // ascending byte positions in the input text; no token may contain one
  const Span* origins = nullptr;       // input byte range of each byte of the text; null: the text is the input
  // `begin` and `end` are byte positions in the text that is searched.
  bool accepts(const AddedToken& token, size_t begin, size_t end) const;
};

// Finds strings of a set in a text: the leftmost match first, and at one position the longest match.
class AddedMatcher {
 public:
  void add(std::string_view pattern, const AddedToken& token);  // ignored when the pattern was added before
  void build();                                                 // call once, after the last add()
  bool empty() const { return at_end_.empty(); }
  // Splits the whole text into tokens and non-empty parts of text, in order. Replaces the content of `parts`.
  void split(std::string_view text, const AddedTokenFilter& filter, std::vector<TextSegment>& parts) const;
  // Returns the byte ranges at which `text` contains a string of the set: for each position at which such strings
  // begin, the range of the longest one. Ranges may overlap.
  std::vector<std::pair<size_t, size_t>> find_all(std::string_view text) const;

 private:
  // Returns the length of the longest pattern that starts at text[at], or 0; `end` receives the pattern's place in the
  // tree.
  size_t longest(std::string_view text, size_t at, RadixTree::Place& end) const;
  bool may_begin_with(char c) const { return first_bytes_[static_cast<unsigned char>(c)]; }

  std::map<std::string, AddedToken, std::less<>> tokens_;    // by pattern; emptied by build()
  RadixTree tree_;                                           // all patterns
  std::unordered_map<RadixTree::Place, AddedToken> at_end_;  // by the place in tree_ where the pattern ends
  std::bitset<256> first_bytes_;                             // the first bytes of all patterns
};

class AddedTokens {
 public:
  // Ids are assigned as in the `tokenizers` library: a token of the vocabulary keeps its id, any other token gets the
  // next free id. This id may have no row in the model's embedding (embedding_rows.h). `named` are the tokens of
  // tokenizer_config.json (config_tokens.h); they are added after the tokens of tokenizer.json.
  AddedTokens(const JsonReader& root, std::span<const AddedToken> named, const TokenTable& vocab,
              const Normalizer& normalizer);

  const AddedMatcher& raw() const { return raw_; }                // tokens to find before normalization
  const AddedMatcher& normalized() const { return normalized_; }  // tokens to find after normalization
  // The patterns are the contents of all special tokens, without normalization.
  const AddedMatcher& special_token_matcher() const { return special_token_matcher_; }
  // The patterns of the returned matcher are the contents of all added tokens, without normalization.
  const AddedMatcher& all_token_matcher() const { return all_token_matcher_; }
  const std::unordered_map<std::string, int32_t>& ids() const { return ids_; }
  // The text that an id decodes to: the token's content, normalized for a token that is `normalized`.
  const std::unordered_map<int32_t, std::string>& strings() const { return strings_; }
  bool is_special(const std::string& token) const { return special_.contains(token); }

 private:
  AddedMatcher raw_, normalized_, special_token_matcher_, all_token_matcher_;
  std::unordered_map<std::string, int32_t> ids_;
  std::unordered_map<int32_t, std::string> strings_;
  std::unordered_set<std::string> special_;
};

}  // namespace tessera::text
