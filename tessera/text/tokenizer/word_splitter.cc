#include "tessera/text/tokenizer/word_splitter.h"

#include "tessera/text/tokenizer/unicode.h"

namespace tessera::text {
namespace {

constexpr uint8_t kKinds = kLetter | kNumber | kSpace;  // a character of none of these classes is a sign (kind 0)

class Scanner {
 public:
  Scanner(const char* end) : end_(end), table_(char_table()) {}

  const char* end() const { return end_; }
  // Returns the class of the character at p, which must be before end(): kLetter, kNumber or kSpace, or 0 for every
  // other character. `after` receives the position after the character.
  uint8_t kind(const char* p, const char*& after) const {
    const auto byte = static_cast<unsigned char>(*p);
    if (byte < 0x80) {
      after = p + 1;
      return table_.ascii[byte] & kKinds;
    }
    const auto c = decode_utf8(p);
    after = p + c.length;
    return char_class(table_, c.code) & kKinds;
  }
  // The end of the run of characters of kind `run_kind` that starts at p.
  const char* run(const char* p, uint8_t run_kind) const {
    while (p < end_) {
      const char* after;
      if (kind(p, after) != run_kind) break;
      p = after;
    }
    return p;
  }
  bool is(const char* p, char c) const { return p < end_ && *p == c; }

 private:
  const char* end_;
  const CharTable& table_;
};

bool is_newline(char c) { return c == '\n' || c == '\r'; }

// The length of the contraction 's 't 'm 'd 're 've 'll that starts at the apostrophe p, or 0.
size_t contraction(const Scanner& scan, const char* p, bool any_case) {
  if (scan.end() - p < 2) return 0;
  const auto lower = [&](char c) { return any_case && c >= 'A' && c <= 'Z' ? static_cast<char>(c | 32) : c; };
  const char first = lower(p[1]);
  if (first == 's' || first == 't' || first == 'm' || first == 'd') return 2;
  if (scan.end() - p < 3) return 0;
  if (any_case && p[1] == '\xC5' && p[2] == '\xBF') return 3;  // U+017F, which (?i:s) matches, too
  const char second = lower(p[2]);
  if ((first == 'r' || first == 'v') && second == 'e') return 3;
  return first == 'l' && second == 'l' ? 3 : 0;
}

// \s+(?!\S)|\s+ : the run of whitespace, without its last character when text follows and the run has more than one.
const char* spaces(const char* p, const char* run_end, const Scanner& scan) {
  if (run_end == scan.end()) return run_end;
  const char* last = previous_char(run_end);
  return last > p ? last : run_end;
}

// The end of the match of the GPT-2 pattern at p. Its alternatives begin with different kinds of characters, or with a
// space and such a kind, so the first two characters decide the alternative without backtracking.
const char* next_gpt2(const char* p, const Scanner& scan) {
  if (*p == '\'') {
    if (const size_t length = contraction(scan, p, false)) return p + length;
  }
  const char* start = *p == ' ' && p + 1 < scan.end() ? p + 1 : p;
  const char* after;
  uint8_t kind = scan.kind(start, after);
  if (kind != kSpace) return scan.run(after, kind);
  return spaces(p, scan.run(p, kSpace), scan);
}

// Returns the end of the match of the Llama 3 or Qwen 2 pattern at p. The function tries the alternatives of the
// pattern in the pattern's order: contraction; letters with at most one other character in front; digits; signs with
// newlines behind; whitespace up to its last newline; other whitespace.
const char* next_llama(const char* p, const Scanner& scan, int max_digits) {
  if (*p == '\'') {
    if (const size_t length = contraction(scan, p, true)) return p + length;
  }
  const char* after;
  const uint8_t kind = scan.kind(p, after);
  if (kind == kLetter) return scan.run(after, kLetter);
  const char* second = after;
  const uint8_t following = after < scan.end() ? scan.kind(after, second) : uint8_t{kSpace};
  if (kind != kNumber && !is_newline(*p) && following == kLetter) return scan.run(second, kLetter);
  if (kind == kNumber) {
    for (int digits = 1; digits < max_digits && after < scan.end(); ++digits) {
      const char* beyond;
      if (scan.kind(after, beyond) != kNumber) break;
      after = beyond;
    }
    return after;
  }
  if (kind == 0 || (*p == ' ' && following == 0)) {
    const char* signs = scan.run(after, 0);
    while (signs < scan.end() && is_newline(*signs)) ++signs;
    return signs;
  }
  const char* run_end = scan.run(after, kSpace);
  for (const char* q = run_end; q > p; --q) {
    if (is_newline(q[-1])) return q;
  }
  return spaces(p, run_end, scan);
}

}  // namespace

std::string_view pattern_text(WordPattern kind) {
  static constexpr std::string_view kTexts[] = {
      R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)",
      R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
      R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"};
  return kTexts[static_cast<size_t>(kind)];
}

std::optional<WordPattern> known_pattern(std::string_view regex) {
  for (const auto kind : {WordPattern::kGpt2, WordPattern::kLlama3, WordPattern::kQwen2}) {
    if (regex == pattern_text(kind)) return kind;
  }
  return std::nullopt;
}

void split_words(WordPattern kind, std::string_view text, uint32_t begin, uint32_t end, std::vector<Span>& pieces) {
  const char* base = text.data();
  const Scanner scan(base + end);
  const int max_digits = kind == WordPattern::kLlama3 ? 3 : 1;
  for (const char* p = base + begin; p < scan.end();) {
    const char* next = kind == WordPattern::kGpt2 ? next_gpt2(p, scan) : next_llama(p, scan, max_digits);
    pieces.push_back({static_cast<uint32_t>(p - base), static_cast<uint32_t>(next - base)});
    p = next;
  }
}

}  // namespace tessera::text
