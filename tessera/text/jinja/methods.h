// How methods are written: a function of the object and the arguments, named in a table for each kind of object.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>

#include "tessera/text/jinja/evaluator.h"

namespace tessera::text::jinja {

using Method = Value (*)(Evaluator&, const Value& self, const Arguments&);
using MethodTable = std::unordered_map<std::string_view, Method>;

// The methods of str (methods_text.cc).
const MethodTable& text_methods();

// An argument of the wanted type; `what` names the function in the failure.
const std::string& text_argument(const Value& value, std::string_view what);
int64_t integer_argument(const Value& value, std::string_view what);

}  // namespace tessera::text::jinja
