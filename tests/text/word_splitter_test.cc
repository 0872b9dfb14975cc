// The hand-written matchers against the regular expressions that they replace.
#include "tessera/text/tokenizer/word_splitter.h"

#include <gtest/gtest.h>

#include <memory>
#include <random>

#include "tessera/base/error.h"
#include "tessera/text/tokenizer/regex.h"
#include "tessera/text/tokenizer/unicode.h"

namespace tessera::text {
namespace {

std::vector<std::string> cut(std::string_view text, const std::vector<Span>& spans) {
  std::vector<std::string> words;
  for (const Span span : spans) words.emplace_back(text.substr(span.begin, span.end - span.begin));
  return words;
}

std::vector<std::string> pieces_of(const std::string& pattern, std::string_view text) {
  RegexScratch scratch;
  std::vector<Span> spans;
  Regex(pattern, "test").find_all(text, scratch, spans);
  return cut(text, spans);
}

// Random texts of characters that both Unicode tables know: Oniguruma's table may be older than utf8proc's. Seven of
// ten parts are from a list of parts that the patterns treat specially.
class RandomText {
 public:
  explicit RandomText(uint32_t seed) : random_(seed) {
    std::string all;
    for (uint32_t code = 0x80; code < 0x30000; ++code) {
      if (code < 0xD800 || code > 0xDFFF) append_utf8(code, all);
    }
    for (const auto& match : pieces_of("\\P{Cn}", all)) known_.push_back(match);
  }
  std::string next() {
    static const std::vector<std::string> pieces = {
        "'s",     "'S",     "'ll",    "'lL",    "'\u017f", "'",      " ",     "  ", "\n",
        "\r\n",   "\t",     "1",      "234",    "ab",      "\u00e9", ".",     "!?", "\u00a0",
        "\u2028", "\u180e", "\u0085", "\u3000", "\u0301",  "\u2160", "\u00bd"};
    std::string text;
    for (size_t i = 0, n = 1 + random_() % 25; i < n; ++i) {
      if (random_() % 10 < 7) {
        text += pieces[random_() % pieces.size()];
      } else {
        text += known_[random_() % known_.size()];
      }
    }
    return text;
  }

 private:
  std::mt19937 random_;
  std::vector<std::string> known_;
};

TEST(WordSplitter, SplitsAsItsRegularExpression) {
  const uint32_t seed = std::random_device{}();
  RandomText texts(seed);
  const std::vector<WordPattern> kinds = {WordPattern::kGpt2, WordPattern::kLlama3, WordPattern::kQwen2};
  std::vector<std::unique_ptr<Regex>> regexes;
  for (const auto kind : kinds) regexes.push_back(std::make_unique<Regex>(pattern_text(kind), "test"));
  RegexScratch scratch;
  for (int round = 0; round < 20'000; ++round) {
    const std::string text = texts.next();
    for (size_t k = 0; k < kinds.size(); ++k) {
      std::vector<Span> expected, found;
      regexes[k]->find_all(text, scratch, expected);
      split_words(kinds[k], text, 0, static_cast<uint32_t>(text.size()), found);
      ASSERT_EQ(cut(text, found), cut(text, expected)) << "pattern " << k << ", seed " << seed << ", round " << round;
    }
  }
}

TEST(WordSplitter, RecognisesOnlyTheExactPatterns) {
  EXPECT_EQ(known_pattern(pattern_text(WordPattern::kLlama3)), WordPattern::kLlama3);
  EXPECT_EQ(known_pattern("\\s+"), std::nullopt);
}

}  // namespace
}  // namespace tessera::text
