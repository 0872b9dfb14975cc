// Marks: the noncharacters U+FDD0 to U+FDEF in texts that a render is given. They stand for places and are no text.
//
//   Value::text("<tool_call>" with marks around it)  ==  Value::text("<tool_call>")
//
// Comparisons, `in`, startswith and endswith see a text without its marks, and strip() goes past them and keeps them,
// so that a template prints a marked text as it prints the plain one, with the marks where they stood. Thread-safe.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::text::jinja {

inline bool is_mark(int32_t code_point) { return code_point >= 0xFDD0 && code_point <= 0xFDEF; }
bool has_marks(std::string_view text);
// With `replacement` in the place of each mark.
std::string without_marks(std::string_view text, std::string_view replacement = {});

}  // namespace tessera::text::jinja
