// Text from files and users in messages: quoting, cutting, and control characters of terminals.
#include "tessera/base/text/quote.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(Quote, PrintableTextIsKeptAndTheRestIsEscaped) {
  EXPECT_EQ(quote("model.layers.0"), "'model.layers.0'");
  EXPECT_EQ(quote("häl \u4f60\u597d \U0001f600 \u2581"), "'häl \u4f60\u597d \U0001f600 \u2581'");
  EXPECT_EQ(escape("a\nb\r\tc\x1b[31m\x7f"), "a\\nb\\r\\tc\\x1b[31m\\x7f");
  EXPECT_EQ(escape(std::string_view("\0", 1)), "\\x00");
  EXPECT_EQ(escape("\u0085\u202egpj\u200b\u2028\U000e0041"), "\\x85\\u202egpj\\u200b\\u2028\\U000e0041");
}

TEST(Quote, InvalidUtf8IsEscaped) {
  EXPECT_EQ(escape("\xff"
                   "a\xc3"),
            "\\xffa\\xc3");
  EXPECT_EQ(escape("\xed\xa0\x80"), "\\xed\\xa0\\x80") << "a surrogate";
  EXPECT_EQ(escape("\xc0\x80\xe0\x80\x80\xf5\x80\x80\x80"), "\\xc0\\x80\\xe0\\x80\\x80\\xf5\\x80\\x80\\x80");
}

TEST(Quote, LongTextIsTruncatedBetweenCharacters) {
  EXPECT_EQ(quote("abcdef", 3), "'abc...'");
  EXPECT_EQ(quote("abc", 3), "'abc'");
  EXPECT_EQ(quote("ab\u00e9", 3), "'ab...'");
  EXPECT_EQ(quote(std::string(1000, 'x')), "'" + std::string(120, 'x') + "...'");
}

TEST(TerminalText, ControlCharactersAreEscapedAndTheRestIsKept) {
  EXPECT_EQ(escape_controls("two\nlines\tof \xC3\xA4, \xF0\x9F\x98\x80\xE2\x80\x8D\xE2\x99\x82"),
            "two\nlines\tof \xC3\xA4, \xF0\x9F\x98\x80\xE2\x80\x8D\xE2\x99\x82");
  EXPECT_EQ(escape_controls("\x1b]52;c;YQ==\x07"), "\\x1b]52;c;YQ==\\x07") << "would write to the clipboard";
  EXPECT_EQ(escape_controls("\r\b\x7f"), "\\x0d\\x08\\x7f");
  EXPECT_EQ(escape_controls("\xC2\x9B"
                            "31m"),
            "\\x9b31m")
      << "C1: the same as ESC [";
  EXPECT_EQ(escape_controls("\xC2\xA0"), "\xC2\xA0") << "a space that does not break is no control";
  EXPECT_EQ(escape_controls(std::string_view("\0", 1)), "\\x00");
  EXPECT_EQ(escape_controls("a\x9B\xFF"), "a\\x9b\\xff") << "bytes that are no UTF-8, which terminals may obey as C1";
  EXPECT_EQ(escape_controls("\xC2\x9B\x7F", "\\u00"), "\\u009b\\u007f") << "JSON's form";
}

}  // namespace
}  // namespace tessera
