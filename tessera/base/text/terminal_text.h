// Text of several lines that nobody vouches for, fit for a terminal.
//
//   std::fputs(escape_controls(text_of_the_model).c_str(), stdout);
//
// All stays as it is but control characters (C0, DEL and C1) other than \n and \t, and bytes that are no UTF-8, which
// are shown as \x1b. base/text/quote.h makes one short line of a text. Pure, thread-safe.
#pragma once

#include <string>
#include <string_view>

namespace tessera {

// `mark` stands before the two hexadecimal digits of a character; "\\u00" is JSON's.
std::string escape_controls(std::string_view text, std::string_view mark = "\\x");

}  // namespace tessera
