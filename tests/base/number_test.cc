// parse_number(): the whole text must be a number.
#include "tessera/base/text/number.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace tessera {
namespace {

TEST(ParseNumber, AcceptsOnlyTextThatIsEntirelyANumber) {
  EXPECT_EQ(parse_number<int64_t>("-17"), -17);
  EXPECT_EQ(parse_number<double>("1e-3"), 1e-3);
  EXPECT_EQ(parse_number<uint8_t>("255"), 255);
  for (const char* text : {"", " 1", "1 ", "+1", "1x", "0x1", "--1", "-"}) {
    EXPECT_FALSE(parse_number<int64_t>(text)) << text;
    EXPECT_FALSE(parse_number<double>(text)) << text;
  }
  EXPECT_FALSE(parse_number<int64_t>("1.5"));
  EXPECT_FALSE(parse_number<uint8_t>("256"));
  EXPECT_FALSE(parse_number<int64_t>("9223372036854775808"));
  EXPECT_FALSE(parse_number<double>("1e999"));
}

}  // namespace
}  // namespace tessera
