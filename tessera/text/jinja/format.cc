// str.format, the % operator of strings, and the format specifications that both use.
#include <algorithm>
#include <cmath>
#include <optional>

#include "tessera/text/jinja/evaluator.h"
#include "tessera/text/jinja/unicode.h"

namespace tessera::text::jinja {
namespace {

// [[fill]align][sign][#][0][width][grouping][.precision][type]
struct FormatSpecification {
  std::string fill = " ";
  char align = 0;
  char sign = '-';
  bool alternate = false;
  char grouping = 0;
  size_t width = 0;
  std::optional<int> precision;
  char type = 0;
};

bool is_one_of(char c, std::string_view characters) { return characters.find(c) != std::string_view::npos; }

// Reads the decimal number at `at` and moves `at` behind it. Returns 0 when there are no digits. RenderError for a
// number above a million, because it may be the width to which a text is padded.
size_t number_at(std::string_view text, size_t& at) {
  size_t value = 0;
  for (; at < text.size() && text[at] >= '0' && text[at] <= '9'; ++at) {
    value = value * 10 + static_cast<size_t>(text[at] - '0');
    if (value > 1'000'000) fail("a format asks for a width or precision beyond a million");
  }
  return value;
}

// The fill may be any character; it is a fill only if an alignment follows. A leading '0' in the width pads numbers
// with zeros after the sign.
FormatSpecification parse_specification(std::string_view text) {
  FormatSpecification made;
  size_t at = 0;
  const auto is_align = [](char c) { return c == '<' || c == '>' || c == '^' || c == '='; };
  const size_t first = text.empty() ? 0 : code_point_at(text, 0).bytes;
  if (first < text.size() && is_align(text[first])) {
    made.fill = text.substr(0, first);
    made.align = text[first];
    at = first + 1;
  } else if (!text.empty() && is_align(text[0])) {
    made.align = text[0];
    at = 1;
  }
  const auto accept = [&](std::string_view options) {
    return at < text.size() && is_one_of(text[at], options) ? text[at++] : '\0';
  };
  if (const char sign = accept("+- ")) made.sign = sign;
  made.alternate = accept("#");
  if (accept("0") && !made.align) {
    made.fill = "0";
    made.align = '=';
  }
  made.width = number_at(text, at);
  made.grouping = accept(",_");
  if (accept(".")) {
    const size_t before = at;
    const size_t precision = number_at(text, at);
    if (at == before) fail("a format has a '.' without precision");
    made.precision = static_cast<int>(std::min<size_t>(precision, 1'000'000));
  }
  made.type = accept("bcdeEfFgGnosxX%");
  if (at != text.size()) fail("'{}' is no format specification", text.substr(0, 40));
  return made;
}

// Inserts `separator` between groups of `every` digits, counted from the end of the integer part.
std::string grouped(std::string digits, char separator, size_t every) {
  const size_t end = std::min(digits.find_first_not_of("0123456789abcdefABCDEF"), digits.size());
  for (size_t at = end; at > every; at -= every) digits.insert(at - every, 1, separator);
  return digits;
}

// Pads to spec.width code points. With align '=' the padding is between the sign and the digits.
std::string padded(std::string_view sign, std::string body, const FormatSpecification& spec, char default_align) {
  const size_t length = count_code_points(sign) + count_code_points(body);
  const size_t missing = spec.width > length ? spec.width - length : 0;
  const char align = spec.align ? spec.align : default_align;
  const size_t left = align == '<' ? 0 : align == '^' ? missing / 2 : missing;
  std::string out;
  const auto fill = [&](size_t count) {
    for (size_t i = 0; i < count; ++i) out += spec.fill;
  };
  if (align == '=') out += sign;
  fill(left);
  if (align != '=') out += sign;
  out += body;
  fill(missing - left);
  return out;
}

std::string sign_of(bool negative, const FormatSpecification& spec) {
  return negative ? "-" : spec.sign == '-' ? "" : std::string(1, spec.sign);
}

std::string formatted_integer(int64_t value, const FormatSpecification& spec) {
  if (spec.precision) fail("an integer has no precision");
  const uint64_t size = value < 0 ? ~static_cast<uint64_t>(value) + 1 : static_cast<uint64_t>(value);
  if (spec.type == 'c') {
    if (value < 0 || value > 0x10ffff || (value >= 0xd800 && value < 0xe000)) fail("{} is no character", value);
    std::string character;
    append_code_point(character, static_cast<int32_t>(value));
    return padded("", std::move(character), spec, '<');
  }
  const bool has_base = is_one_of(spec.type, "boxX");
  std::string sign = sign_of(value < 0, spec);
  std::string digits = fmt::format(fmt::runtime(fmt::format("{{:{}}}", has_base ? spec.type : 'd')), size);
  if (spec.grouping) digits = grouped(std::move(digits), spec.grouping, has_base ? 4 : 3);
  if (spec.alternate && has_base) (sign += '0') += spec.type;
  return padded(sign, std::move(digits), spec, '>');
}

// Formats a float. The fmt library prints the types e, E, f, g and G like Python; F and % are printed with f, and n
// with g. Without type and precision the shortest digits that read back as the same double are printed. Without a type
// the result always looks like a float ("1.0").
std::string formatted_real(double value, const FormatSpecification& spec) {
  const int precision = spec.precision.value_or(6);
  if (precision > 1000) fail("a number is printed with more than 1000 digits");
  const double size = std::fabs(spec.type == '%' ? value * 100 : value);
  char presentation = spec.type;  // the presentation type of the fmt library
  if (spec.type == 0 || spec.type == 'n') presentation = 'g';
  if (spec.type == 'F' || spec.type == '%') presentation = 'f';
  if (!is_one_of(presentation, "eEfgG")) fail("format '{}' does not fit a float", spec.type);
  std::string digits = spec.type == 0 && !spec.precision
                           ? repr_of_double(size)
                           : fmt::format(fmt::runtime(fmt::format("{{:.{}{}}}", precision, presentation)), size);
  if (spec.type == '%') digits += '%';
  if (spec.type == 0 && std::isfinite(size) && digits.find_first_of(".e") == std::string::npos) digits += ".0";
  if (spec.grouping) digits = grouped(std::move(digits), spec.grouping, 3);
  return padded(sign_of(std::signbit(value), spec), std::move(digits), spec, '>');
}

std::string formatted_text(std::string_view text, const FormatSpecification& spec) {
  if (spec.align == '=' && spec.fill != "0") fail("'=' alignment is for numbers");
  FormatSpecification used = spec;
  if (used.align == '=') used.align = '<';
  std::string body(text);
  if (spec.precision) body.resize(byte_offset(body, static_cast<size_t>(*spec.precision)));
  return padded("", std::move(body), used, '<');
}

std::string formatted(const Value& value, std::string_view text, Budget& budget) {
  if (text.empty()) return to_text(value, budget);
  const FormatSpecification spec = parse_specification(text);
  const bool text_type = spec.type == 0 || spec.type == 's';
  if (value.is(ValueKind::kString)) {
    if (!text_type) fail("format '{}' does not fit a str", spec.type);
    return formatted_text(value.as_text(), spec);
  }
  if (value.is_integral() && spec.type != 's') {
    const bool real = is_one_of(spec.type, "eEfFgG%");
    return real ? formatted_real(value.as_double(), spec) : formatted_integer(value.as_int(), spec);
  }
  if (value.is(ValueKind::kFloat)) return formatted_real(value.as_double(), spec);
  if (value.is(ValueKind::kUndefined)) return formatted_text("", spec);
  fail("a {} has no format '{}'", type_name(value), text.substr(0, 40));
}

// One str.format call. `depth` limits the nesting of fields inside format specifications, as in "{:{width}}".
class Formatter {
 public:
  Formatter(Evaluator& evaluator, const Arguments& arguments) : evaluator_(evaluator), arguments_(arguments) {}

  std::string run(std::string_view format, int depth) {
    if (depth < 0) fail("a format is nested too deep");
    std::string out;
    for (size_t at = 0; at < format.size();) {
      const char c = format[at];
      if ((c == '{' || c == '}') && at + 1 < format.size() && format[at + 1] == c) {
        out += c;
        at += 2;
      } else if (c == '}') {
        fail("a format holds a single '}}'");
      } else if (c == '{') {
        const size_t end = closing(format, at + 1);
        out += field(format.substr(at + 1, end - at - 1), depth);
        at = end + 1;
      } else {
        out += c;
        ++at;
      }
      evaluator_.budget().check_size(out.size());
    }
    evaluator_.budget().charge(out.size());
    return out;
  }

 private:
  // The position of the '}' that closes the field which begins at `at`; fields inside it are skipped.
  static size_t closing(std::string_view format, size_t at) {
    for (int open = 1; at < format.size(); ++at) {
      open += format[at] == '{' ? 1 : format[at] == '}' ? -1 : 0;
      if (open == 0) return at;
    }
    fail("a format holds a '{{' without '}}'");
  }

  // Formats one field: NAME[!CONVERSION][:SPECIFICATION], without the braces.
  std::string field(std::string_view text, int depth) {
    const size_t colon = text.find(':');
    std::string_view name = text.substr(0, colon);
    const std::string spec = colon == std::string_view::npos ? "" : run(text.substr(colon + 1), depth - 1);
    char conversion = 0;
    if (const size_t mark = name.find('!'); mark != std::string_view::npos) {
      if (mark + 2 != name.size()) fail("'{}' is no conversion", name.substr(mark, 40));
      conversion = name[mark + 1];
      name = name.substr(0, mark);
    }
    Value value = look_up(name);
    if (conversion == 'r') {
      value = evaluator_.make_text(to_repr(value, evaluator_.budget()));
    } else if (conversion == 's') {
      value = evaluator_.make_text(evaluator_.text_of(value));
    } else if (conversion) {
      fail("'!{}' is no conversion", conversion);
    }
    return formatted(value, spec, evaluator_.budget());
  }

  // Resolves NAME: an argument, then any number of ".attribute" and "[item]", through the sandbox of the evaluator.
  Value look_up(std::string_view name) {
    size_t at = std::min(name.find_first_of(".["), name.size());
    Value value = argument(name.substr(0, at));
    while (at < name.size()) {
      const bool attribute = name[at] == '.';
      const size_t end = attribute ? std::min(name.find_first_of(".[", at + 1), name.size()) : name.find(']', at);
      if (end == std::string_view::npos) fail("a format field has no ']'");
      const std::string part(name.substr(at + 1, end - at - 1));
      if (part.empty()) fail("a format field has an empty attribute");
      const bool number = part.size() < 10 && part.find_first_not_of("0123456789") == std::string::npos;
      value = attribute ? evaluator_.attribute(value, part)
                        : evaluator_.item(value, number ? Value::integer(std::stoll(part)) : Value::text(part));
      at = attribute ? end : end + 1;
    }
    return value;
  }

  Value argument(std::string_view name) {
    if (name.find_first_not_of("0123456789") == std::string_view::npos) {
      size_t at = 0;
      const size_t index = name.empty() ? automatic_++ : number_at(name, at);
      if (index >= arguments_.positional.size()) {
        fail("a format wants argument {}, {} are given", index, arguments_.positional.size());
      }
      return arguments_.positional[index];
    }
    evaluator_.budget().charge(arguments_.named.size() * 16);
    for (const auto& [key, value] : arguments_.named) {
      if (key == name) return value;
    }
    fail("a format wants the argument '{}'", name.substr(0, 80));
  }

  Evaluator& evaluator_;
  const Arguments& arguments_;
  size_t automatic_ = 0;
};

// Formats `value` for one conversion of `text % values`. `spec` has the flags, width and precision; `type` is the
// letter.
std::string percent_field(const Value& value, char type, FormatSpecification spec, Budget& budget) {
  if (is_one_of(type, "sra")) {
    spec.fill = " ";
    if (!spec.align || spec.align == '=') spec.align = '>';
    return formatted_text(type == 's' ? to_text(value, budget) : to_repr(value, budget), spec);
  }
  if (type == 'c' && value.is(ValueKind::kString)) return formatted_text(value.as_text(), spec);
  if (!is_one_of(type, "diuxXoeEfFgG")) fail("'%{}' is no conversion", type);
  if (!value.is_number()) fail("%{} wants a number, not {}", type, type_name(value));
  if (is_one_of(type, "diuxXo")) {
    if (std::fabs(value.as_double()) > 9e18) fail("an integer does not fit in 64 bits");
    spec.precision.reset();
    spec.type = is_one_of(type, "xXo") ? type : 'd';
    return formatted_integer(value.is(ValueKind::kFloat) ? static_cast<int64_t>(value.as_double()) : value.as_int(),
                             spec);
  }
  spec.type = type;
  return formatted_real(value.as_double(), spec);
}

}  // namespace

std::string format_new_style(Evaluator& evaluator, const std::string& format, const Arguments& arguments) {
  return Formatter(evaluator, arguments).run(format, 2);
}

// A conversion is %[(name)][flags][width][.precision]type. Conversions with a name read from a dict; the other ones
// read the items of a tuple in order, or a single value. As in Python it is a failure to leave items of a tuple unused.
std::string format_percent(const std::string& format, const Value& values, Budget& budget) {
  budget.charge(format.size());
  std::string out;
  size_t next = 0;
  bool used_names = false;
  const auto next_value = [&]() -> Value {
    const size_t count = values.is(ValueKind::kTuple) ? values.items().size() : 1;
    if (next >= count) fail("not enough values for the format");
    return values.is(ValueKind::kTuple) ? values.items()[next++] : (++next, values);
  };
  for (size_t at = 0; at < format.size(); ++at) {
    budget.check_size(out.size());
    if (format[at] != '%') {
      out += format[at];
      continue;
    }
    if (++at >= format.size()) fail("a format ends with '%'");
    Value named;
    bool has_name = false;
    if (format[at] == '(') {
      const size_t end = format.find(')', at);
      if (end == std::string::npos || !values.is(ValueKind::kDict)) fail("a format with names wants a mapping");
      const Value* found = values.get<Dict>().find(Value::text(format.substr(at + 1, end - at - 1)), budget);
      if (!found) fail("a format wants the key '{}'", format.substr(at + 1, std::min<size_t>(80, end - at - 1)));
      named = *found;
      has_name = used_names = true;
      at = end + 1;
    }
    FormatSpecification spec;
    for (; at < format.size() && is_one_of(format[at], "-+ #0"); ++at) {
      if (format[at] == '-') spec.align = '<';
      if (format[at] == '+' || format[at] == ' ') spec.sign = format[at];
      if (format[at] == '#') spec.alternate = true;
      if (format[at] == '0' && spec.align != '<') {
        spec.align = '=';
        spec.fill = "0";
      }
    }
    if (spec.align == '<') spec.fill = " ";
    spec.width = number_at(format, at);
    if (at < format.size() && format[at] == '.') {
      ++at;
      spec.precision = static_cast<int>(number_at(format, at));
    }
    if (at >= format.size()) fail("a format ends inside a conversion");
    if (format[at] == '%') {
      out += '%';
    } else {
      out += percent_field(has_name ? named : next_value(), format[at], spec, budget);
    }
  }
  const bool all_used = values.is(ValueKind::kTuple) ? next == values.items().size()
                                                     : next == 1 || used_names || values.is(ValueKind::kDict);
  if (!all_used) fail("not all values are used by the format");
  return out;
}

std::string html_escaped(std::string_view text) {
  static constexpr std::string_view kCharacters = "&<>'\"", kReferences[] = {"&amp;", "&lt;", "&gt;", "&#39;", "&#34;"};
  std::string out;
  for (const char& c : text) {
    const size_t at = kCharacters.find(c);
    out += at == std::string_view::npos ? std::string_view(&c, 1) : kReferences[at];
  }
  return out;
}

}  // namespace tessera::text::jinja
