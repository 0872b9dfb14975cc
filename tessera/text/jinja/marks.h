// Marks are the noncharacters U+FDD0 to U+FDEF in the values of a render. The caller puts them into a text to find
// positions of this text again in the output; they are not part of the text.
//
//   Value::text("<tool_call>" with marks around it)  ==  Value::text("<tool_call>")
//
// Comparisons, `in`, startswith and endswith ignore marks, and strip() skips and keeps them. So a template prints a
// marked text like the text without marks, with the marks at their positions. Thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::text::jinja {

inline bool is_mark(int32_t code_point) { return code_point >= 0xFDD0 && code_point <= 0xFDEF; }
bool has_marks(std::string_view text);
// Returns `text` with each mark replaced by `replacement`.
std::string without_marks(std::string_view text, std::string_view replacement = {});

}  // namespace tessera::text::jinja
