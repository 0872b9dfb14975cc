#include "tessera/base/text/terminal_text.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(TerminalText, ControlCharactersAreShownAndAllElseStays) {
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
