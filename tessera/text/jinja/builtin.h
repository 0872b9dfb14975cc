// How filters, methods and global functions are written: a function of a value (undefined for global functions) and
// its arguments, with its parameters in a table by name.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tessera/text/jinja/evaluator.h"

namespace tessera::text::jinja {

struct Builtin {
  Value (*call)(Evaluator&, const Value& input, const Bound&) = nullptr;
  std::vector<std::string_view> parameters{};
  size_t required = 0;  // of the parameters
  // In place of the above: a function that binds its arguments itself.
  Value (*call_unbound)(Evaluator&, const Value& input, const Arguments&) = nullptr;
};
using BuiltinTable = std::unordered_map<std::string_view, Builtin>;

Value call_builtin(const BuiltinTable::value_type& builtin, Evaluator& evaluator, const Value& input,
                   const Arguments& arguments);

const BuiltinTable& sequence_filters();  // over lists and dicts (filters_sequence.cc)
const BuiltinTable& text_methods();      // of str (methods_text.cc)

// An argument of the wanted type; `what` names the function in the failure.
const std::string& text_argument(const Value& value, std::string_view what);
int64_t integer_argument(const Value& value, std::string_view what);

}  // namespace tessera::text::jinja
