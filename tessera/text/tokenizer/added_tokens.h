// Added tokens: strings that are found in the text before (or, when `normalized`, after) normalization and become one
// id.
//
//   AddedTokens added(file.root(), named, vocab, normalizer);
//   added.raw().split(text, {.parse_special = true}, parts);
//   for (const AddedPart& part : parts) part.id == AddedPart::kText ? ... : ...
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
#include "tessera/text/tokenizer/text_tree.h"
#include "tessera/text/tokenizer/token_table.h"

namespace tessera::text {

struct AddedToken {
  std::string content;
  int32_t id = 0;
  bool single_word = false, lstrip = false, rstrip = false, normalized = false, special = false;
  bool operator==(const AddedToken&) const = default;
};

struct AddedPart {
  static constexpr int32_t kText = -1;
  Span span;
  int32_t id;
};

// What of the tokens in a text counts.
struct AddedWanted {
  bool parse_special = true;
  std::span<const size_t> barriers{};  // places in the text before normalization, over which none reaches
  const Span* origins = nullptr;       // of the text's bytes, where they are not their own
  bool takes(const AddedToken& token, size_t begin, size_t end) const;
};

// Finds the leftmost, among those the longest, of a set of strings.
class AddedMatcher {
 public:
  void add(std::string_view pattern, const AddedToken& token);  // of equal patterns the first counts
  void build();                                                 // once all are added
  bool empty() const { return at_end_.empty(); }
  // Cuts the whole text into parts; parts of text may not be empty. Replaces `parts`.
  void split(std::string_view text, const AddedWanted& wanted, std::vector<AddedPart>& parts) const;
  // The range of the longest at each place, overlapping ones too.
  std::vector<std::pair<size_t, size_t>> find_all(std::string_view text) const;

 private:
  // Length of the longest pattern at text[at], and its place in the tree; 0 when none.
  size_t longest(std::string_view text, size_t at, TextTree::Place& end) const;
  bool may_begin_with(char c) const { return first_bytes_[static_cast<unsigned char>(c)]; }

  std::map<std::string, AddedToken, std::less<>> tokens_;   // by pattern, until build()
  TextTree tree_;                                           // of the patterns
  std::unordered_map<TextTree::Place, AddedToken> at_end_;  // by the place where their pattern ends
  std::bitset<256> first_bytes_;
};

class AddedTokens {
 public:
  // Ids as upstream gives them: the vocabulary's for a token that it holds, else the next free one, which may lie
  // beyond the rows of the model's embedding (token_rows.h). `named` are tokens of tokenizer_config.json
  // (named_tokens.h), which come behind those of the file.
  AddedTokens(const JsonReader& root, std::span<const AddedToken> named, const TokenTable& vocab,
              const Normalizer& normalizer);

  const AddedMatcher& raw() const { return raw_; }
  const AddedMatcher& normalized() const { return normalized_; }
  // Special tokens as they are written, before normalization.
  const AddedMatcher& written() const { return written_; }
  // All of them as they are written.
  const AddedMatcher& all_written() const { return all_written_; }
  const std::unordered_map<std::string, int32_t>& ids() const { return ids_; }
  // What an id decodes to: the content, for normalized tokens after normalization.
  const std::unordered_map<int32_t, std::string>& strings() const { return strings_; }
  bool is_special(const std::string& token) const { return special_.contains(token); }

 private:
  AddedMatcher raw_, normalized_, written_, all_written_;
  std::unordered_map<std::string, int32_t> ids_;
  std::unordered_map<int32_t, std::string> strings_;
  std::unordered_set<std::string> special_;
};

}  // namespace tessera::text
