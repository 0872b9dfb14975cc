// format_count(): whole numbers below ten thousand, else three digits with a unit.
#include "tessera/base/text/count_text.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(FormatCount, KeepsThreeDigits) {
  EXPECT_EQ(format_count(0), "0");
  EXPECT_EQ(format_count(1536), "1536");
  EXPECT_EQ(format_count(24'576), "24.6 k");
  EXPECT_EQ(format_count(999'499), "999 k");
  EXPECT_EQ(format_count(999'500), "1.00 M");
  EXPECT_EQ(format_count(4'980'736), "4.98 M");
  EXPECT_EQ(format_count(134'515'008), "135 M");
  EXPECT_EQ(format_count(8'030'261'248), "8.03 B");
  EXPECT_EQ(format_count(1'500'000'000'000), "1500 B");
}

}  // namespace
}  // namespace tessera
