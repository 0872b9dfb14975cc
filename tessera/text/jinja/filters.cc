// The table of all filters, and the filters for single values and texts.

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "tessera/text/jinja/builtin.h"
#include "tessera/text/jinja/unicode.h"

namespace tessera::text::jinja {
namespace {

// str(input), like markupsafe's soft_str: a markup string stays markup.
Value as_text_value(Evaluator& evaluator, const Value& input) {
  return input.is(ValueKind::kString) ? input : evaluator.make_text(evaluator.text_of(input));
}

template <std::string (*Map)(std::string_view)>
Value map_filter_text(Evaluator& evaluator, const Value& input, const BoundArguments&) {
  const Value text = as_text_value(evaluator, input);
  return evaluator.make_text(Map(text.as_text()), text.is_markup());
}

// Jinja2's filter `title`, which differs from str.title: words begin after whitespace, '-' and opening brackets.
std::string title_words(std::string_view text) {
  std::string out;
  bool begins = true;
  for_each_code_point(text, [&](std::string_view one, int32_t c) {
    out += begins ? upper(one) : lower(one);
    begins = is_space(c) || c == '-' || c == '(' || c == '{' || c == '[' || c == '<';
  });
  return out;
}

Value trim(Evaluator& evaluator, const Value& input, const BoundArguments& bound) {
  Arguments forwarded;
  if (bound[0]) forwarded.positional.push_back(*bound[0]);
  return call_method(evaluator, as_text_value(evaluator, input), "strip", forwarded);
}

Value replace(Evaluator& evaluator, const Value& input, const BoundArguments& bound) {
  Arguments forwarded;
  forwarded.positional.push_back(evaluator.make_text(evaluator.text_of(*bound[0])));
  forwarded.positional.push_back(evaluator.make_text(evaluator.text_of(*bound[1])));
  if (bound[2] && !bound[2]->is(ValueKind::kNone)) forwarded.positional.push_back(*bound[2]);
  return call_method(evaluator, evaluator.make_text(evaluator.text_of(input)), "replace", forwarded);
}

Value center(Evaluator& evaluator, const Value& input, const BoundArguments& bound) {
  return call_method(evaluator, as_text_value(evaluator, input), "center",
                     {{bound[0] ? *bound[0] : Value::integer(80)}, {}});
}

Value format(Evaluator& evaluator, const Value& input, const Arguments& arguments) {
  if (!arguments.named.empty() && !arguments.positional.empty()) {
    fail("format takes positional or keyword arguments, not both");
  }
  Value values = evaluator.make_list(arguments.positional, ValueKind::kTuple);
  if (!arguments.named.empty()) {
    auto named = std::make_shared<Dict>();
    for (const auto& [name, value] : arguments.named) named->set(Value::text(name), value, evaluator.budget());
    values = evaluator.make_dict(std::move(named));
  }
  return binary(evaluator, Operator::kModulo, as_text_value(evaluator, input), values);
}

// The indentation that `width` gives: a string as it is, or a number of spaces. RenderError for a value of another
// type; its message begins with `expected`.
std::string indentation(const Value& width, std::string_view expected, const Budget& budget) {
  if (width.is(ValueKind::kString)) return width.as_text();
  if (!width.is_integral()) fail("{}, not {}", expected, type_name(width));
  const auto spaces = static_cast<size_t>(std::max<int64_t>(0, width.as_int()));
  budget.check_size(spaces);
  return std::string(spaces, ' ');
}

Value indent(Evaluator& evaluator, const Value& input, const BoundArguments& bound) {
  if (!input.is(ValueKind::kString)) fail("indent wants a str, not {}", type_name(input));
  const Value width = bound[0] ? *bound[0] : Value::integer(4);
  const std::string prefix = indentation(width, "indent wants a width", evaluator.budget());
  const bool first = bound[1] && truthy(*bound[1]), blank = bound[2] && truthy(*bound[2]);
  const Value lines = call_method(evaluator, Value::text(fmt::format("{}\n", input.as_text())), "splitlines", {});
  std::string out;
  if (first) out = prefix;
  for (size_t i = 0; i < lines.items().size(); ++i) {
    const std::string& line = lines.items()[i].as_text();
    if (i > 0) out += '\n';
    if (i > 0 && (blank || !line.empty())) out += prefix;
    out += line;
    evaluator.budget().check_size(out.size());
  }
  return evaluator.make_text(std::move(out), input.is_markup());
}

Value to_string(Evaluator& evaluator, const Value& input, const BoundArguments&) {
  return as_text_value(evaluator, input);
}

Value safe(Evaluator& evaluator, const Value& input, const BoundArguments&) {
  return evaluator.make_text(evaluator.text_of(input), true);
}

Value escape(Evaluator& evaluator, const Value& input, const BoundArguments&) {
  if (input.is_markup()) return input;
  return evaluator.make_text(html_escaped(evaluator.text_of(input)), true);
}

Value word_count(Evaluator& evaluator, const Value& input, const BoundArguments&) {
  int64_t words = 0;
  bool inside = false;
  for_each_code_point(evaluator.text_of(input), [&](std::string_view, int32_t c) {
    const bool part = is_letter(c) || is_digit(c) || c == '_';
    words += part && !inside;
    inside = part;
  });
  return Value::integer(words);
}

Value default_value(Evaluator&, const Value& input, const BoundArguments& bound) {
  const bool boolean = bound[1] && truthy(*bound[1]);
  if (!input.is(ValueKind::kUndefined) && !(boolean && !truthy(input))) return input;
  return bound[0] ? *bound[0] : Value::text("");
}

// Reads a number like Python's float(): with underscores and surrounding whitespace, without hexadecimal forms.
bool parse_double(std::string_view text, double& value) {
  std::string digits(strip(text, true, true));
  std::erase(digits, '_');
  if (digits.empty() || digits.size() > 400 || digits.find_first_of("xXpP(") != std::string::npos) return false;
  char* end = nullptr;
  value = std::strtod(digits.c_str(), &end);
  return end == digits.c_str() + digits.size();
}

bool parse_integer(std::string_view text, int base, int64_t& value) {
  std::string digits(strip(text, true, true));
  std::erase(digits, '_');
  std::string_view rest = digits;
  const bool negative = rest.starts_with('-');
  if (negative || rest.starts_with('+')) rest.remove_prefix(1);
  const char letter = rest.size() > 2 && rest[0] == '0' ? static_cast<char>(rest[1] | 0x20) : ' ';
  if ((base == 16 && letter == 'x') || (base == 8 && letter == 'o') || (base == 2 && letter == 'b')) {
    rest.remove_prefix(2);
  }
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), value, base);
  if (rest.empty() || rest[0] == '-' || end != rest.data() + rest.size()) return false;
  if (error != std::errc()) fail("an integer does not fit in 64 bits");
  if (negative) value = -value;
  return true;
}

// Jinja2's filter `int`. For a value that is no number, the result is the default instead of an error. Underscores and
// base prefixes are accepted as in Python's int().
Value to_integer(Evaluator&, const Value& input, const BoundArguments& bound) {
  const int64_t base = bound[1] && bound[1]->is_integral() ? bound[1]->as_int() : 10;
  if (base < 2 || base > 36) fail("int wants a base of 2 to 36");
  const Value otherwise = bound[0] ? *bound[0] : Value::integer(0);
  if (input.is(ValueKind::kUndefined)) fail("{}", input.hint());
  if (input.is_integral()) return Value::integer(input.as_int());
  if (input.is(ValueKind::kBigInt)) return input;
  double number = 0;
  if (input.is(ValueKind::kString)) {
    int64_t value = 0;
    if (parse_integer(input.as_text(), static_cast<int>(base), value)) return Value::integer(value);
    if (!parse_double(input.as_text(), number)) return otherwise;
  } else if (input.is(ValueKind::kFloat)) {
    number = input.as_double();
  } else {
    return otherwise;
  }
  if (!std::isfinite(number)) return otherwise;
  if (std::fabs(number) > 9e18) fail("an integer does not fit in 64 bits");
  return Value::integer(static_cast<int64_t>(number));
}

Value to_real(Evaluator&, const Value& input, const BoundArguments& bound) {
  if (input.is(ValueKind::kUndefined)) fail("{}", input.hint());
  if (input.is_number()) return Value::real(input.as_double());
  double number = 0;
  if (input.is(ValueKind::kString) && parse_double(input.as_text(), number)) return Value::real(number);
  return bound[0] ? *bound[0] : Value::real(0);
}

Value absolute(Evaluator& evaluator, const Value& input, const BoundArguments&) {
  if (!input.is_number()) fail("abs wants a number, not {}", type_name(input));
  if (input.is(ValueKind::kFloat)) return Value::real(std::fabs(input.as_double()));
  if (input.is(ValueKind::kBigInt)) {
    const auto& digits = input.as_text();
    return Value::big_integer(digits.substr(digits[0] == '-' ? 1 : 0));
  }
  return input.as_int() < 0 ? binary(evaluator, Operator::kSubtract, Value::integer(0), input)
                            : Value::integer(input.as_int());
}

Value round_number(Evaluator&, const Value& input, const BoundArguments& bound) {
  if (!input.is_number()) fail("round wants a number, not {}", type_name(input));
  const int64_t precision = bound[0] && bound[0]->is_integral() ? bound[0]->as_int() : 0;
  if (precision < -300 || precision > 300) fail("round wants a precision of -300 to 300");
  const std::string method = bound[1] && bound[1]->is(ValueKind::kString) ? bound[1]->as_text() : "common";
  const double scale = std::pow(10.0, static_cast<double>(precision));
  const double number = input.as_double();
  if (method == "ceil") return Value::real(std::ceil(number * scale) / scale);
  if (method == "floor") return Value::real(std::floor(number * scale) / scale);
  if (method != "common") fail("round wants the method common, ceil or floor");
  if (input.is_integral() && precision >= 0) return Value::integer(input.as_int());
  if (input.is(ValueKind::kBigInt)) {
    if (precision < 0) fail("an integer does not fit in 64 bits");
    return input;
  }
  if (precision < 0) {
    const double rounded = std::nearbyint(number * scale) / scale;
    return input.is_integral() ? Value::integer(static_cast<int64_t>(rounded)) : Value::real(rounded);
  }
  return Value::real(
      std::strtod(fmt::format("{:.{}f}", number, precision).c_str(), nullptr));  // like Python, rounds decimal digits
}

Value json(Evaluator& evaluator, const Value& input, const BoundArguments& bound) {
  JsonStyle style;
  style.ascii = bound[0] && truthy(*bound[0]);
  style.sort_keys = bound[3] && truthy(*bound[3]);
  if (bound[1] && !bound[1]->is(ValueKind::kNone)) {
    style.pretty = true;
    style.item_separator.assign(1, ',');
    style.indent = indentation(*bound[1], "tojson wants an indent", evaluator.budget());
  }
  if (bound[2] && !bound[2]->is(ValueKind::kNone)) {
    const auto parts = elements(*bound[2], evaluator.budget());
    if (parts.size() != 2 || !parts[0].is(ValueKind::kString) || !parts[1].is(ValueKind::kString)) {
      fail("tojson wants two separators");
    }
    style.item_separator = parts[0].as_text();
    style.key_separator = parts[1].as_text();
  }
  return evaluator.make_text(to_json(input, style, evaluator.budget()));
}

const BuiltinTable& filters() {
  static const BuiltinTable kTable = [] {
    BuiltinTable table = {
        {"abs", {absolute}},
        {"capitalize", {map_filter_text<capitalize>}},
        {"center", {center, {"width"}}},
        {"d", {default_value, {"default_value", "boolean"}}},
        {"default", {default_value, {"default_value", "boolean"}}},
        {"e", {escape}},
        {"escape", {escape}},
        {"float", {to_real, {"default"}}},
        {"format", {.call_with_arguments = format}},
        {"indent", {indent, {"width", "first", "blank"}}},
        {"int", {to_integer, {"default", "base"}}},
        {"lower", {map_filter_text<lower>}},
        {"replace", {replace, {"old", "new", "count"}, 2}},
        {"round", {round_number, {"precision", "method"}}},
        {"safe", {safe}},
        {"string", {to_string}},
        {"title", {map_filter_text<title_words>}},
        {"tojson", {json, {"ensure_ascii", "indent", "separators", "sort_keys"}}},
        {"trim", {trim, {"chars"}}},
        {"upper", {map_filter_text<upper>}},
        {"wordcount", {word_count}},
    };
    table.insert(sequence_filters().begin(), sequence_filters().end());
    return table;
  }();
  return kTable;
}

}  // namespace

bool has_filter(std::string_view name) { return filters().contains(name); }

std::string unknown_filter_message(std::string_view name) {
  return fmt::format("there is no filter '{}'", name.substr(0, 40));
}

Value apply_filter(Evaluator& evaluator, const std::string& name, const Value& input, const Arguments& arguments) {
  const auto found = filters().find(name);
  if (found == filters().end()) fail("{}", unknown_filter_message(name));
  evaluator.budget().charge(input.is(ValueKind::kString) ? input.as_text().size() : 0);
  return call_builtin(*found, evaluator, input, arguments);
}

}  // namespace tessera::text::jinja
