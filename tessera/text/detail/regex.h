// The regular expressions of tokenizer.json: Oniguruma's Ruby syntax, run by PCRE2 with JIT.
//
//   Regex regex("\\s+(?!\\S)", "tokenizer.json: pre_tokenizer.pattern");
//   RegexScratch scratch;
//   for (size_t at = 0; regex.find(text, at, scratch, match); at = ...) ...
//
// A Regex is immutable and thread-safe; a RegexScratch belongs to one thread at a time.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/text/detail/aligned_text.h"

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
  ~Regex();
  Regex(const Regex&) = delete;
  Regex& operator=(const Regex&) = delete;

  // Appends all matches, in order, without overlap. An empty match right after a match does not count.
  // `text` is valid UTF-8. Error kFormat when the pattern needs more steps or memory than allowed.
  void find_all(std::string_view text, RegexScratch& scratch, std::vector<Span>& matches) const;
  const std::string& pattern() const { return pattern_; }

 private:
  struct Code;
  std::string pattern_;
  std::string where_;
  std::unique_ptr<Code> code_;
};

// The PCRE2 spelling of an Oniguruma pattern; Error kFormat for what has none. Exposed for tests.
std::string translate_pattern(std::string_view pattern, const std::string& where);

}  // namespace tessera::text
