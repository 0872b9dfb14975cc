// The methods of strings.
#include <algorithm>

#include "tessera/text/jinja/builtin.h"
#include "tessera/text/jinja/marks.h"
#include "tessera/text/jinja/search.h"
#include "tessera/text/jinja/unicode.h"

namespace tessera::text::jinja {

const std::string& text_argument(const Value& value, std::string_view function_name) {
  if (!value.is(ValueKind::kString)) fail("{} wants a str, not {}", function_name, type_name(value));
  return value.as_text();
}

int64_t integer_argument(const Value& value, std::string_view function_name) {
  if (!value.is_integral()) fail("{} wants an int, not {}", function_name, type_name(value));
  return value.as_int();
}

namespace {

Value like(Evaluator& evaluator, const Value& self, std::string_view text) {
  return evaluator.make_text(std::string(text), self.is_markup());
}

template <std::string (*Map)(std::string_view)>
Value map_text(Evaluator& evaluator, const Value& self, const BoundArguments&) {
  return like(evaluator, self, Map(self.as_text()));
}

// Returns the result of strip() for `marked`, a text with marks (marks.h). `plain` is `marked` without its marks, and
// `stripped` is the part of `plain` that strip() keeps. Marks in the removed parts are kept, at the ends of the result.
std::string with_marks_kept(std::string_view marked, std::string_view plain, std::string_view stripped) {
  const auto first = static_cast<size_t>(stripped.data() - plain.data()), last = first + stripped.size();
  std::string out;
  size_t at = 0;  // in `plain`
  for_each_code_point(marked, [&](std::string_view one, int32_t c) {
    if (is_mark(c)) {
      out += one;
      return;
    }
    if (first <= at && at < last) out += one;
    at += one.size();
  });
  return out;
}

template <bool kLeft, bool kRight>
Value strip_text(Evaluator& evaluator, const Value& self, const BoundArguments& bound) {
  const bool marked = !self.is_ascii() && has_marks(self.as_text());
  const std::string without = marked ? without_marks(self.as_text()) : std::string();
  const std::string_view plain = marked ? std::string_view(without) : std::string_view(self.as_text());
  std::string_view stripped;
  if (!bound[0] || bound[0]->is(ValueKind::kNone)) {
    stripped = strip(plain, kLeft, kRight);
  } else {
    const std::string& characters = text_argument(*bound[0], "strip");
    evaluator.budget().charge(self.as_text().size() + characters.size());
    stripped = strip(plain, kLeft, kRight, characters);
  }
  if (!marked) return like(evaluator, self, stripped);
  evaluator.budget().charge(self.as_text().size());
  return like(evaluator, self, with_marks_kept(self.as_text(), plain, stripped));
}

// str.split() without a separator: the words between whitespace. After `limit` splits (below 0: no limit) the rest is
// one piece.
std::vector<std::string_view> split_space(std::string_view text, int64_t limit, bool from_right) {
  std::vector<std::string_view> pieces;
  text = strip(text, true, true);
  for (; !text.empty() && limit != 0; limit -= limit > 0) {
    const auto rest = strip_word(text, !from_right, from_right);
    pieces.push_back(from_right ? text.substr(rest.size()) : text.substr(0, text.size() - rest.size()));
    text = strip(rest, !from_right, from_right);
  }
  if (!text.empty()) pieces.push_back(text);
  if (from_right) std::ranges::reverse(pieces);
  return pieces;
}

Value text_list(Evaluator& evaluator, const Value& self, const std::vector<std::string_view>& pieces,
                ValueKind kind = ValueKind::kList) {
  std::vector<Value> items;
  evaluator.budget().charge(pieces.size() * 96 + self.as_text().size());
  items.reserve(pieces.size());
  for (const auto piece : pieces) items.push_back(Value::text(std::string(piece), self.is_markup()));
  return evaluator.make_list(std::move(items), kind);
}

template <bool kFromRight>
Value split_text(Evaluator& evaluator, const Value& self, const BoundArguments& bound) {
  const int64_t limit = bound[1] ? integer_argument(*bound[1], "split") : -1;
  if (!bound[0] || bound[0]->is(ValueKind::kNone)) {
    return text_list(evaluator, self, split_space(self.as_text(), limit, kFromRight));
  }
  const std::string& separator = text_argument(*bound[0], "split");
  if (separator.empty()) fail("split wants a separator that is not empty");
  return text_list(evaluator, self, split_at(self.as_text(), separator, limit, kFromRight, evaluator.budget()));
}

// str.splitlines: Python's line boundaries, not only '\n'. "\r\n" is one boundary.
Value split_lines(Evaluator& evaluator, const Value& self, const BoundArguments& bound) {
  const bool keep = bound[0] && truthy(*bound[0]);
  const std::string_view text = self.as_text();
  std::vector<std::string_view> lines;
  for (size_t at = 0, begin = 0; begin < text.size();) {
    size_t end = at;
    if (at < text.size()) {
      const auto [c, bytes] = code_point_at(text, at);
      end = at + bytes;
      const bool breaks =
          (c >= 0x0a && c <= 0x0d) || (c >= 0x1c && c <= 0x1e) || c == 0x85 || c == 0x2028 || c == 0x2029;
      if (!breaks) {
        at = end;
        continue;
      }
      if (c == '\r' && end < text.size() && text[end] == '\n') ++end;
    }
    lines.push_back(text.substr(begin, (keep ? end : at) - begin));
    begin = at = end;
  }
  return text_list(evaluator, self, lines);
}

template <bool kFromRight>
Value partition(Evaluator& evaluator, const Value& self, const BoundArguments& bound) {
  const std::string& separator = text_argument(*bound[0], "partition");
  if (separator.empty()) fail("partition wants a separator that is not empty");
  const std::string_view text = self.as_text();
  const size_t at = kFromRight ? find_last(text, separator, evaluator.budget())
                               : SubstringSearch(text, separator, evaluator.budget()).find();
  if (at == std::string_view::npos) {
    return kFromRight ? text_list(evaluator, self, {"", "", text}, ValueKind::kTuple)
                      : text_list(evaluator, self, {text, "", ""}, ValueKind::kTuple);
  }
  return text_list(evaluator, self, {text.substr(0, at), separator, text.substr(at + separator.size())},
                   ValueKind::kTuple);
}

// self[start:end], for methods with these two arguments, such as startswith(); `start` and `end` count code points.
// `first` receives the start, clamped to the string.
std::string_view ranged(Evaluator& evaluator, const Value& self, const Value* start, const Value* end, size_t& first) {
  first = 0;
  const std::string_view text = self.as_text();
  if (!start && !end) return text;
  evaluator.budget().charge(text.size());
  const auto length = static_cast<int64_t>(count_code_points(text));
  const auto bounded = [&](const Value* value, int64_t missing) {
    if (!value || value->is(ValueKind::kNone)) return missing;
    const int64_t at = integer_argument(*value, "the range");
    return std::clamp<int64_t>(at < 0 ? at + length : at, 0, length);
  };
  const int64_t from = bounded(start, 0), to = bounded(end, length);
  first = static_cast<size_t>(from);
  if (from >= to) return {};
  const size_t begin = byte_offset(text, static_cast<size_t>(from));
  return text.substr(begin, byte_offset(text.substr(begin), static_cast<size_t>(to - from)));
}

template <bool kEnd>
Value has_affix(Evaluator& evaluator, const Value& self, const BoundArguments& bound) {
  size_t first = 0;
  std::string_view text = ranged(evaluator, self, bound[1], bound[2], first);
  std::string plain;
  if (!self.is_ascii() && has_marks(text)) {
    evaluator.budget().charge(text.size());
    text = plain = without_marks(text);
  }
  const auto matches = [&](const Value& affix) {
    const std::string& needle = text_argument(affix, kEnd ? "endswith" : "startswith");
    return kEnd ? text.ends_with(needle) : text.starts_with(needle);
  };
  if (!bound[0]->is(ValueKind::kTuple)) return Value::boolean(matches(*bound[0]));
  const auto& affixes = bound[0]->items();
  return Value::boolean(std::ranges::any_of(affixes, matches));
}

template <bool kFromRight, bool kMustBeThere>
Value find_text(Evaluator& evaluator, const Value& self, const BoundArguments& bound) {
  size_t first = 0;
  const std::string_view text = ranged(evaluator, self, bound[1], bound[2], first);
  const std::string& needle = text_argument(*bound[0], "find");
  const size_t at = kFromRight ? find_last(text, needle, evaluator.budget())
                               : SubstringSearch(text, needle, evaluator.budget()).find();
  if (at != std::string_view::npos) {
    return Value::integer(static_cast<int64_t>(first + count_code_points(text.substr(0, at))));
  }
  if (kMustBeThere) fail("the substring is not there");
  return Value::integer(-1);
}

Value count_text(Evaluator& evaluator, const Value& self, const BoundArguments& bound) {
  size_t first = 0;
  const std::string_view text = ranged(evaluator, self, bound[1], bound[2], first);
  const std::string& needle = text_argument(*bound[0], "count");
  if (needle.empty()) return Value::integer(static_cast<int64_t>(count_code_points(text)) + 1);
  int64_t count = 0;
  const SubstringSearch search(text, needle, evaluator.budget());
  for (size_t at = search.find(); at != std::string_view::npos; at = search.find(at + needle.size())) ++count;
  return Value::integer(count);
}

// str.replace. An empty `from` matches before each code point and at the end, as in Python.
Value replace_text(Evaluator& evaluator, const Value& self, const BoundArguments& bound) {
  const std::string& from = text_argument(*bound[0], "replace");
  const std::string& to = text_argument(*bound[1], "replace");
  int64_t left = bound[2] && !bound[2]->is(ValueKind::kNone) ? integer_argument(*bound[2], "replace") : -1;
  const std::string_view text = self.as_text();
  const SubstringSearch search(text, from, evaluator.budget());
  std::string out;
  size_t at = 0;
  for (; left != 0; left -= left > 0) {
    const size_t found = search.find(at);
    if (found == std::string_view::npos) break;
    out.append(text, at, found - at).append(to);
    evaluator.budget().check_size(out.size());
    at = found + from.size();
    if (!from.empty()) continue;
    if (at >= text.size()) return like(evaluator, self, out);
    const size_t bytes = code_point_at(text, at).bytes;  // an empty `from` matches before each code point
    out.append(text, at, bytes);
    at += bytes;
  }
  out.append(text, at);
  return like(evaluator, self, out);
}

Value join_texts(Evaluator& evaluator, const Value& self, const BoundArguments& bound) {
  std::string out;
  bool first = true;
  for (const auto& element : elements(*bound[0], evaluator.budget())) {
    if (!first) out += self.as_text();
    first = false;
    out += text_argument(element, "join");
    evaluator.budget().check_size(out.size());
  }
  return like(evaluator, self, out);
}

template <bool kSuffix>
Value remove_affix(Evaluator& evaluator, const Value& self, const BoundArguments& bound) {
  const std::string& affix = text_argument(*bound[0], "remove");
  std::string_view text = self.as_text();
  if (kSuffix && text.ends_with(affix)) text.remove_suffix(affix.size());
  if (!kSuffix && text.starts_with(affix)) text.remove_prefix(affix.size());
  return like(evaluator, self, text);
}

// kSide: -1 ljust, 0 center, 1 rjust, 2 zfill. For center, Python puts the odd character on the left if the width is
// odd.
template <int kSide>
Value pad_text(Evaluator& evaluator, const Value& self, const BoundArguments& bound) {
  std::string_view fill = kSide == 2 ? "0" : bound[1] ? std::string_view(text_argument(*bound[1], "the padding")) : " ";
  if (count_code_points(fill) != 1) fail("the fill character must be one character");
  const int64_t missing = integer_argument(*bound[0], "the padding") - length_of(self, evaluator.budget());
  if (missing <= 0) return self;
  evaluator.budget().check_size(static_cast<size_t>(missing));
  const int64_t width = missing + length_of(self, evaluator.budget());
  const int64_t left = kSide == -1 ? 0 : kSide == 0 ? missing / 2 + (missing & width & 1) : missing;
  std::string_view text = self.as_text();
  std::string out;
  if (kSide == 2 && (text.starts_with('-') || text.starts_with('+'))) {
    out += text[0];
    text.remove_prefix(1);
  }
  for (int64_t i = 0; i < left; ++i) out += fill;
  out += text;
  for (int64_t i = left; i < missing; ++i) out += fill;
  return like(evaluator, self, out);
}

template <bool (*Accepts)(int32_t)>
Value all_are(Evaluator&, const Value& self, const BoundArguments&) {
  bool all = !self.as_text().empty();
  for_each_code_point(self.as_text(), [&](std::string_view, int32_t c) { all = all && Accepts(c); });
  return Value::boolean(all);
}

bool letter_or_digit(int32_t c) { return is_letter(c) || is_digit(c); }

template <bool (*Wanted)(int32_t), bool (*Other)(int32_t)>
Value all_cased(Evaluator&, const Value& self, const BoundArguments&) {
  return Value::boolean(is_cased<Wanted, Other>(self.as_text()));
}

Value format_text(Evaluator& evaluator, const Value& self, const Arguments& arguments) {
  return like(evaluator, self, format_new_style(evaluator, self.as_text(), arguments));
}

}  // namespace

const BuiltinTable& text_methods() {
  static const BuiltinTable kTable = {
      {"upper", {map_text<upper>}},
      {"lower", {map_text<lower>}},
      {"casefold", {map_text<lower>}},
      {"capitalize", {map_text<capitalize>}},
      {"title", {map_text<title>}},
      {"strip", {strip_text<true, true>, {"chars"}}},
      {"lstrip", {strip_text<true, false>, {"chars"}}},
      {"rstrip", {strip_text<false, true>, {"chars"}}},
      {"split", {split_text<false>, {"sep", "maxsplit"}}},
      {"rsplit", {split_text<true>, {"sep", "maxsplit"}}},
      {"splitlines", {split_lines, {"keepends"}}},
      {"partition", {partition<false>, {"sep"}, 1}},
      {"rpartition", {partition<true>, {"sep"}, 1}},
      {"startswith", {has_affix<false>, {"affix", "start", "end"}, 1}},
      {"endswith", {has_affix<true>, {"affix", "start", "end"}, 1}},
      {"find", {find_text<false, false>, {"sub", "start", "end"}, 1}},
      {"rfind", {find_text<true, false>, {"sub", "start", "end"}, 1}},
      {"index", {find_text<false, true>, {"sub", "start", "end"}, 1}},
      {"rindex", {find_text<true, true>, {"sub", "start", "end"}, 1}},
      {"count", {count_text, {"sub", "start", "end"}, 1}},
      {"replace", {replace_text, {"old", "new", "count"}, 2}},
      {"join", {join_texts, {"iterable"}, 1}},
      {"removeprefix", {remove_affix<false>, {"affix"}, 1}},
      {"removesuffix", {remove_affix<true>, {"affix"}, 1}},
      {"ljust", {pad_text<-1>, {"width", "fillchar"}, 1}},
      {"center", {pad_text<0>, {"width", "fillchar"}, 1}},
      {"rjust", {pad_text<1>, {"width", "fillchar"}, 1}},
      {"zfill", {pad_text<2>, {"width", "fillchar"}, 1}},
      {"isspace", {all_are<is_space>}},
      {"isalpha", {all_are<is_letter>}},
      {"isdigit", {all_are<is_digit>}},
      {"isdecimal", {all_are<is_digit>}},
      {"isnumeric", {all_are<is_digit>}},
      {"isalnum", {all_are<letter_or_digit>}},
      {"islower", {all_cased<is_lower, is_upper>}},
      {"isupper", {all_cased<is_upper, is_lower>}},
      {"format", {.call_with_arguments = format_text}},
  };
  return kTable;
}

}  // namespace tessera::text::jinja
