// Regular expressions in Oniguruma's syntax: matches, errors and step limits.
#include "tessera/text/tokenizer/regex.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <regex.h>

#include <thread>

#include "tessera/base/error.h"

namespace tessera::text {
namespace {

using ::testing::HasSubstr;
using Words = std::vector<std::string>;

Words matches(const std::string& pattern, const std::string& text) {
  RegexScratch scratch;
  std::vector<Span> spans;
  Regex(pattern, "test").find_all(text, scratch, spans);
  Words words;
  for (const Span span : spans) words.push_back(text.substr(span.begin, span.end - span.begin));
  return words;
}

std::string error_of(const std::string& pattern, const std::string& text) {
  try {
    matches(pattern, text);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kFormat);
    return error.what();
  }
  return "no error";
}

TEST(Regex, FollowsOnigurumasSyntax) {
  EXPECT_EQ(matches("\\s+", "a\u180eb\u0085\u3000c"), (Words{"\u0085\u3000"}));  // U+180E is no white space
  EXPECT_EQ(matches("[^\\s\\S]|\\S+", "a b"), (Words{"a", "b"}));
  EXPECT_EQ(matches("\\p{N}{1,3}+", "12345678x"), (Words{"12345678"}));  // + repeats, it is not possessive
  EXPECT_EQ(matches("(?:ab|[0-9]){2}+", "abababab9"), (Words{"abababab"}));
  EXPECT_EQ(matches("\\h+", "xfa09g"), (Words{"fa09"}));
  EXPECT_EQ(matches("\\w+", "e\u0301t_\u00bd"), (Words{"e\u0301t_\u00bd"}));  // marks and fractions count
  EXPECT_EQ(matches("^.", "ab\ncd"), (Words{"a", "c"}));
  EXPECT_EQ(matches("x*", "axxb"), (Words{"", "xx", ""}));  // no empty match right after xx
  EXPECT_EQ(matches("[]a]+", "x]a"), (Words{"]a"}));
}

TEST(Regex, FollowsOnigurumaWherePcreDiffers) {
  EXPECT_EQ(matches("^a{,1}b", "ab"), (Words{"ab"}));                 // PCRE2 before 10.43: the text "a{,1}"
  EXPECT_EQ(matches("(?m:aa.)", "aa\naab"), (Words{"aa\n", "aab"}));  // m means that a dot matches a newline
  EXPECT_EQ(matches("[a-d&&[^b]]+", "abcd"), (Words{"a", "cd"}));     // intersection, class in a class
  EXPECT_EQ(matches("[\\W]+", "a--b"), (Words{"--"}));
  EXPECT_EQ(matches("\\N+", "a\nb"), (Words{"a", "b"}));
  EXPECT_THAT(error_of("(?s:.)", "a"), HasSubstr("undefined group option"));
}

TEST(Regex, ErrorsNameAnInvalidPattern) {
  for (const char* pattern : {"(a", "a)", "[a", "\\", "\\p{L", "*a", "(?<n>", "\\p{Nix}"}) {
    EXPECT_THAT(error_of(pattern, ""), HasSubstr("does not compile")) << pattern;
  }
  EXPECT_THAT(error_of(std::string(5000, '(') + std::string(5000, ')'), ""), HasSubstr("parse depth limit over"));
  EXPECT_THAT(error_of(std::string(70000, 'a'), ""), HasSubstr("at most 65536 allowed"));
  EXPECT_THAT(error_of("(\x1b[31m", ""), HasSubstr("'(\\x1b[31m'"));
}

// A match at one character stays below the limit of a single match. The matches over the whole text must be limited
// too.
TEST(Regex, StepsAreLimitedOverTheFullText) {
  EXPECT_THAT(error_of("(?:.*){3}X|.", std::string(4000, 'a')), HasSubstr("stopped on a text of 4000 bytes"));
  EXPECT_THAT(error_of("(a+)+(a+)+(a+)+[bc]d", std::string(5000, 'a') + " d"),
              HasSubstr("stopped on a text of 5002 bytes"));
}

TEST(Regex, LongRunsOfSpacesStayWithinTheStepLimit) {
  const std::string pattern = R"(\s*[\r\n]+|\s+(?!\S)|\s+|\S+)";
  std::string text;
  for (int i = 0; i < 20; ++i) text += std::string(20'000, ' ') + "word";
  const auto found = matches(pattern, text);
  EXPECT_EQ(found.size(), 60u);
  EXPECT_EQ(found[0].size(), 19'999u);
}

// libonig has a function regcomp() too. That function must not replace the C library's function.
TEST(Regex, DoesNotReplacePosixRegcomp) {
  const Regex ours("a", "test");
  regex_t posix;
  ASSERT_EQ(::regcomp(&posix, "^[0-9]+\\.[0-9]+$", REG_EXTENDED), 0);
  EXPECT_EQ(::regexec(&posix, "12.5", 0, nullptr, 0), 0);
  EXPECT_EQ(::regexec(&posix, "1225", 0, nullptr, 0), REG_NOMATCH);
  ::regfree(&posix);
}

TEST(Regex, ThreadsCanShareARegex) {
  const Regex regex("\\p{L}+|\\p{N}{1,3}", "test");
  std::vector<size_t> counts(4);
  std::vector<std::thread> threads;
  for (auto& count : counts) {
    threads.emplace_back([&regex, &count] {
      RegexScratch scratch;
      for (int i = 0; i < 200; ++i) {
        std::vector<Span> spans;
        regex.find_all("one 12345 two", scratch, spans);
        count += spans.size();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_THAT(counts, ::testing::Each(800u));
}

}  // namespace
}  // namespace tessera::text
