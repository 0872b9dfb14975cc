// The regular expressions of tokenizer.json, by Oniguruma, which the tokenizers library uses too.
//
//   Regex regex("\\s+(?!\\S)", "[text.load] tokenizer.json: pre_tokenizer.pattern");
//   RegexScratch scratch;
//   regex.find_all(text, scratch, matches);
//
// A pattern is hostile input: what one find_all() may backtrack is limited by the length of its text, whatever the
// pattern is, and so is its memory. A Regex is immutable and thread-safe; a RegexScratch belongs to one thread at a
// time.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/text/tokenizer/aligned_text.h"

namespace tessera::text {

class RegexScratch {
 public:
  RegexScratch();
  ~RegexScratch();
  RegexScratch(const RegexScratch&) = delete;
  RegexScratch& operator=(const RegexScratch&) = delete;

 private:
  friend class Regex;
  struct Data;
  std::unique_ptr<Data> data_;
};

class Regex {
 public:
  // Error kFormat names `where` when the pattern cannot be used.
  Regex(std::string_view pattern, std::string where);

  // Appends all matches, in order, without overlap. An empty match right after a match does not count.
  // `text` is valid UTF-8. Error kFormat when the pattern needs more steps or memory than allowed.
  void find_all(std::string_view text, RegexScratch& scratch, std::vector<Span>& matches) const;
  const std::string& pattern() const { return pattern_; }

 private:
  std::string pattern_;
  std::string where_;
  std::shared_ptr<void> code_;  // Oniguruma's
};

}  // namespace tessera::text
