#include "tessera/base/text/quote.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(Quote, PrintableTextStaysAndTheRestIsSpelled) {
  EXPECT_EQ(quote("model.layers.0"), "'model.layers.0'");
  EXPECT_EQ(quote("häl \u4f60\u597d \U0001f600 \u2581"), "'häl \u4f60\u597d \U0001f600 \u2581'");
  EXPECT_EQ(escape("a\nb\r\tc\x1b[31m\x7f"), "a\\nb\\r\\tc\\x1b[31m\\x7f");
  EXPECT_EQ(escape(std::string_view("\0", 1)), "\\x00");
  EXPECT_EQ(escape("\u0085\u202egpj\u200b\u2028\U000e0041"), "\\x85\\u202egpj\\u200b\\u2028\\U000e0041");
}

TEST(Quote, BytesThatAreNoUtf8AreSpelled) {
  EXPECT_EQ(escape("\xff"
                   "a\xc3"),
            "\\xffa\\xc3");
  EXPECT_EQ(escape("\xed\xa0\x80"), "\\xed\\xa0\\x80") << "a surrogate";
  EXPECT_EQ(escape("\xc0\x80\xe0\x80\x80\xf5\x80\x80\x80"), "\\xc0\\x80\\xe0\\x80\\x80\\xf5\\x80\\x80\\x80");
}

TEST(Quote, LongTextIsCutBetweenCharacters) {
  EXPECT_EQ(quote("abcdef", 3), "'abc...'");
  EXPECT_EQ(quote("abc", 3), "'abc'");
  EXPECT_EQ(quote("ab\u00e9", 3), "'ab...'");
  EXPECT_EQ(quote(std::string(1000, 'x')), "'" + std::string(120, 'x') + "...'");
}

}  // namespace
}  // namespace tessera
