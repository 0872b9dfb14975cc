// The regular expressions of tokenizer.json, run by Oniguruma, the engine of the `tokenizers` library.
//
//   Regex regex("\\s+(?!\\S)", "[text.load] tokenizer.json: pre_tokenizer.pattern");
//   RegexScratch scratch;
//   regex.find_all(text, scratch, matches);
//
// A pattern is hostile input. For every pattern the backtracking steps of one find_all() have a limit that grows with
// the length of the text, and memory has a fixed limit. A Regex is immutable and thread-safe; a RegexScratch belongs to
// one thread at a time.
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
  // Compiles `pattern`. Error kFormat when the pattern is too long or does not compile. The error messages of this
  // object begin with `where`.
  Regex(std::string_view pattern, std::string where);

  // Appends the byte ranges of all matches, in order and without overlap. An empty match directly after another match
  // is skipped. `text` is valid UTF-8. Error kFormat when the pattern needs more steps or memory than the limits.
  void find_all(std::string_view text, RegexScratch& scratch, std::vector<Span>& matches) const;
  const std::string& pattern() const { return pattern_; }

 private:
  std::string pattern_;
  std::string where_;
  std::shared_ptr<void> code_;  // the OnigRegex
};

}  // namespace tessera::text
