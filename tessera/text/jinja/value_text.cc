// Implements str(), repr() and json.dumps() for values.
#include <algorithm>
#include <charconv>
#include <cmath>

#include "tessera/text/jinja/evaluator.h"
#include "tessera/text/jinja/marks.h"
#include "tessera/text/jinja/unicode.h"
#include "tessera/text/jinja/value.h"

namespace tessera::text::jinja {

// The shortest digits that read back as the same double, in Python's format: scientific below 1e-4 and from 1e16 on.
std::string repr_of_double(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char digits[64];
  const double size = std::fabs(value);
  const bool scientific = size != 0 && (size < 1e-4 || size >= 1e16);
  const auto format = scientific ? std::chars_format::scientific : std::chars_format::fixed;
  const auto [end, error] = std::to_chars(digits, digits + sizeof digits, value, format);
  if (error != std::errc()) fail("a number that cannot be printed");
  std::string text(digits, end);
  if (!scientific && text.find('.') == std::string::npos) text += ".0";
  return text;
}

namespace {

// Writes one value by a recursive traversal. For each nested value, start() charges the render's Budget for the bytes
// that were written since the last charge. It fails when the output is already larger than Budget::max_bytes.
class ValueWriter {
 public:
  ValueWriter(Budget& budget, const JsonStyle* style) : budget_(budget), style_(style) {}

  std::string finish() { return std::move(out_); }

  void repr(const Value& value, int depth) {
    start(depth);
    switch (value.kind()) {
      case ValueKind::kString:
        return quote(value);
      case ValueKind::kList:
        return sequence(value.items(), "[", "]", depth);
      case ValueKind::kTuple:
        return sequence(value.items(), "(", value.items().size() == 1 ? ",)" : ")", depth);
      case ValueKind::kView:
        return sequence(value.items(), "dict_items([", "])", depth);
      case ValueKind::kRange:
        return range(value.items());
      case ValueKind::kDict:
        return mapping(value.get<Dict>(), depth);
      case ValueKind::kNamespace:
        out_ += "<Namespace ";
        mapping(*value.get<Namespace>().attributes, depth);
        out_ += ">";
        return;
      default:
        out_ += scalar(value);
    }
  }

  void json(const Value& value, int depth) {
    start(depth);
    switch (value.kind()) {
      case ValueKind::kNone:
        out_ += "null";
        return;
      case ValueKind::kBool:
        out_ += value.as_int() ? "true" : "false";
        return;
      case ValueKind::kInt:
      case ValueKind::kBigInt:
        out_ += scalar(value);
        return;
      case ValueKind::kFloat:
        out_ += json_number(value.as_double());
        return;
      case ValueKind::kString:
        return json_string(value.as_text());
      case ValueKind::kList:
      case ValueKind::kTuple:
        return container("[", "]", value.items().size(), depth, [&](size_t i) { json(value.items()[i], depth + 1); });
      case ValueKind::kDict:
        return json_dict(value.get<Dict>(), depth);
      default:
        fail("a value of type {} has no JSON", type_name(value));
    }
  }

 private:
  void start(int depth) {
    budget_.check_depth(depth);
    budget_.charge(out_.size() - charged_);
    charged_ = out_.size();
    budget_.check_size(out_.size());
  }

  static std::string scalar(const Value& value) {
    switch (value.kind()) {
      case ValueKind::kUndefined:
        return "Undefined";
      case ValueKind::kNone:
        return "None";
      case ValueKind::kBool:
        return value.as_int() ? "True" : "False";
      case ValueKind::kInt:
        return fmt::format("{}", value.as_int());
      case ValueKind::kBigInt:
        return value.as_text();
      case ValueKind::kFloat:
        return repr_of_double(value.as_double());
      case ValueKind::kMacro:
        return fmt::format("<Macro '{}'>", value.get<Macro>().tree->name);
      default:
        return fmt::format("<{}>", type_name(value));
    }
  }

  // Writes the text as a quoted string, as Python's repr does: in single quotes, or in double quotes if the text has a
  // single quote and no double quote. The marks that the caller put into the text (marks.h) are not escaped, so the
  // caller can find them in the output.
  void quote(const Value& value) {
    const std::string& text = value.as_text();
    const char mark = text.find('\'') != std::string::npos && text.find('"') == std::string::npos ? '"' : '\'';
    if (value.is_markup()) out_ += "Markup(";
    out_ += mark;
    for_each_code_point(text, [&](std::string_view one, int32_t c) {
      if (c == '\n') {
        out_ += "\\n";
      } else if (c == '\r') {
        out_ += "\\r";
      } else if (c == '\t') {
        out_ += "\\t";
      } else if (c == '\\' || c == mark) {
        (out_ += '\\') += static_cast<char>(c);
      } else if (is_printable(c) || is_mark(c)) {
        out_ += one;
      } else {
        out_ += c < 0x100     ? fmt::format("\\x{:02x}", c)
                : c < 0x10000 ? fmt::format("\\u{:04x}", c)
                              : fmt::format("\\U{:08x}", c);
      }
    });
    out_ += mark;
    if (value.is_markup()) out_ += ")";
  }

  // Writes `count` elements; write(i) writes element i. In pretty style each element has its own line.
  template <class Write>
  void container(std::string_view open, std::string_view close, size_t count, int depth, Write write) {
    out_ += open;
    for (size_t i = 0; i < count; ++i) {
      if (i > 0) out_ += style_ ? std::string_view(style_->item_separator) : ", ";
      line_break(depth + 1);
      write(i);
    }
    if (count > 0) line_break(depth);
    out_ += close;
  }

  void sequence(const std::vector<Value>& items, std::string_view open, std::string_view close, int depth) {
    container(open, close, items.size(), depth, [&](size_t i) { repr(items[i], depth + 1); });
  }

  // A range stores its items, so start, stop and step are computed from them.
  void range(const std::vector<Value>& items) {
    const int64_t step = items.size() > 1 ? items[1].as_int() - items[0].as_int() : 1;
    const int64_t first = items.empty() ? 0 : items[0].as_int();
    const int64_t last = items.empty() ? 0 : items.back().as_int() + step;
    out_ += step == 1 ? fmt::format("range({}, {})", first, last) : fmt::format("range({}, {}, {})", first, last, step);
  }

  void mapping(const Dict& dict, int depth) {
    container("{", "}", dict.entries.size(), depth, [&](size_t i) {
      repr(dict.entries[i].first, depth + 1);
      out_ += ": ";
      repr(dict.entries[i].second, depth + 1);
    });
  }

  static std::string json_number(double value) {
    if (std::isnan(value)) return "NaN";
    if (std::isinf(value)) return value < 0 ? "-Infinity" : "Infinity";
    return repr_of_double(value);
  }

  // Writes a JSON string as json.dumps does. With ensure_ascii, characters beyond U+FFFF become a pair of surrogates.
  // Code points for which is_mark() is true (marks.h) are never escaped.
  void json_string(const std::string& text) {
    out_ += '"';
    for_each_code_point(text, [&](std::string_view one, int32_t c) {
      static constexpr std::string_view kFrom = "\"\\\n\r\t\f\b", kTo = "\"\\nrtfb";
      if (const size_t at = c < 0x80 ? kFrom.find(static_cast<char>(c)) : std::string_view::npos;
          at != std::string_view::npos) {
        (out_ += '\\') += kTo[at];
      } else if (c < 0x20 || (style_->ascii && c > 0x7f && !is_mark(c))) {
        if (c < 0x10000) {
          out_ += fmt::format("\\u{:04x}", c);
        } else {
          out_ += fmt::format("\\u{:04x}\\u{:04x}", 0xd800 + ((c - 0x10000) >> 10), 0xdc00 + ((c - 0x10000) & 0x3ff));
        }
      } else {
        out_ += one;
      }
    });
    out_ += '"';
  }

  void line_break(int depth) {
    if (!style_ || !style_->pretty) return;
    out_ += '\n';
    for (int i = 0; i < depth; ++i) out_ += style_->indent;
    budget_.check_size(out_.size());
  }

  void json_dict(const Dict& dict, int depth) {
    std::vector<const std::pair<Value, Value>*> entries;
    for (const auto& entry : dict.entries) entries.push_back(&entry);
    if (style_->sort_keys) {
      std::ranges::stable_sort(entries,
                               [&](const auto* a, const auto* b) { return less(a->first, b->first, budget_); });
    }
    container("{", "}", entries.size(), depth, [&](size_t i) {
      json_key(entries[i]->first, depth);
      out_ += style_->key_separator;
      json(entries[i]->second, depth + 1);
    });
  }

  void json_key(const Value& key, int depth) {
    if (key.is(ValueKind::kString)) return json_string(key.as_text());
    if (!key.is_number() && !key.is(ValueKind::kNone)) fail("a JSON key cannot be a {}", type_name(key));
    out_ += '"';
    json(key, depth + 1);
    out_ += '"';
  }

  Budget& budget_;
  const JsonStyle* style_;
  std::string out_;
  size_t charged_ = 0;
};

}  // namespace

std::string to_text(const Value& value, Budget& budget) {
  if (value.is(ValueKind::kString)) return value.as_text();
  if (value.is(ValueKind::kUndefined)) return "";
  return to_repr(value, budget);
}

std::string to_repr(const Value& value, Budget& budget) {
  ValueWriter writer(budget, nullptr);
  writer.repr(value, 0);
  return writer.finish();
}

std::string to_json(const Value& value, const JsonStyle& style, Budget& budget) {
  ValueWriter writer(budget, &style);
  writer.json(value, 0);
  return writer.finish();
}

}  // namespace tessera::text::jinja
