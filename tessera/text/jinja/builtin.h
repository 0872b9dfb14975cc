// The filters, methods and global functions of templates. Each is a C++ function of an input value and its arguments; a
// BuiltinTable maps its name to the function and the names of its parameters. The input of a global function is an
// undefined value.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tessera/text/jinja/evaluator.h"

namespace tessera::text::jinja {

struct Builtin {
  Value (*call)(Evaluator&, const Value& input, const BoundArguments&) = nullptr;
  std::vector<std::string_view> parameters{};
  size_t required = 0;  // the number of parameters, from the first, that need an argument
  // The function of a builtin that binds its arguments itself; `call`, `parameters` and `required` are then not used.
  Value (*call_with_arguments)(Evaluator&, const Value& input, const Arguments&) = nullptr;
};
using BuiltinTable = std::unordered_map<std::string_view, Builtin>;

Value call_builtin(const BuiltinTable::value_type& builtin, Evaluator& evaluator, const Value& input,
                   const Arguments& arguments);

const BuiltinTable& sequence_filters();  // over lists and dicts (filters_sequence.cc)
const BuiltinTable& text_methods();      // methods of str (methods_text.cc)

// The str or int in `value`. RenderError for a value of another type; its message begins with `function_name`, the name
// of the function.
const std::string& text_argument(const Value& value, std::string_view function_name);
int64_t integer_argument(const Value& value, std::string_view function_name);

}  // namespace tessera::text::jinja
