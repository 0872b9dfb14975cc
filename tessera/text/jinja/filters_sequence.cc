// The filters for lists and dicts.
#include <algorithm>
#include <optional>

#include "tessera/text/jinja/builtin.h"
#include "tessera/text/jinja/unicode.h"

namespace tessera::text::jinja {
namespace {

bool flag(const Value* value) { return value && truthy(*value); }

// The attribute that the filters' `attribute` argument selects: item.a.b.0 for the path "a.b.0", item[n] for a number,
// the item itself for none. `otherwise` replaces an undefined value at each step of the path.
Value look_up(Evaluator& evaluator, Value item, const Value& path, const Value* otherwise = nullptr) {
  if (!path.is(ValueKind::kString)) return path.is(ValueKind::kNone) ? item : evaluator.item(item, path);
  const std::string& text = path.as_text();
  evaluator.budget().charge(text.size());
  for (size_t at = 0; at <= text.size();) {
    const size_t dot = std::min(text.find('.', at), text.size());
    const std::string part = text.substr(at, dot - at);
    const bool number = !part.empty() && part.size() < 10 && part.find_first_not_of("0123456789") == std::string::npos;
    item = evaluator.item(item, number ? Value::integer(std::stoll(part)) : Value::text(part));
    if (otherwise && !otherwise->is(ValueKind::kNone) && item.is(ValueKind::kUndefined)) item = *otherwise;
    at = dot + 1;
  }
  return item;
}

// The key by which a filter compares: strings in lower case, unless case_sensitive.
Value folded(Evaluator& evaluator, const Value& value, bool case_sensitive) {
  return !case_sensitive && value.is(ValueKind::kString) ? evaluator.make_text(lower(value.as_text())) : value;
}

struct KeyedValue {
  Value key, value;
};

// A stable sort by the keys. `reverse` swaps the operands of the comparison instead of reversing the sorted list, so
// equal items keep their order, as in Python.
std::vector<Value> sorted(Evaluator& evaluator, std::vector<KeyedValue> items, bool reverse) {
  const auto before = [&](const KeyedValue& a, const KeyedValue& b) {
    return reverse ? less(b.key, a.key, evaluator.budget()) : less(a.key, b.key, evaluator.budget());
  };
  std::ranges::stable_sort(items, before);
  std::vector<Value> values;
  for (auto& item : items) values.push_back(std::move(item.value));
  return values;
}

Value length(Evaluator& evaluator, const Value& input, const BoundArguments&) {
  return Value::integer(length_of(input, evaluator.budget()));
}

Value list(Evaluator& evaluator, const Value& input, const BoundArguments&) {
  return evaluator.make_list(elements(input, evaluator.budget()));
}

Value items(Evaluator& evaluator, const Value& input, const BoundArguments&) {
  std::vector<Value> pairs;
  if (!input.is(ValueKind::kUndefined)) {
    if (!input.is(ValueKind::kDict)) fail("items wants a mapping, not {}", type_name(input));
    for (const auto& [key, value] : input.get<Dict>().entries) {
      pairs.push_back(evaluator.make_list({key, value}, ValueKind::kTuple));
    }
  }
  return evaluator.make_list(std::move(pairs), ValueKind::kGenerator);
}

Value dict_sort(Evaluator& evaluator, const Value& input, const BoundArguments& bound) {
  const std::string by = bound[1] ? evaluator.text_of(*bound[1]) : "key";
  if (by != "key" && by != "value") fail("dictsort sorts by 'key' or 'value', not '{}'", by.substr(0, 40));
  if (!input.is(ValueKind::kDict)) fail("dictsort wants a mapping, not {}", type_name(input));
  std::vector<KeyedValue> pairs;
  for (const auto& [key, value] : input.get<Dict>().entries) {
    pairs.push_back({folded(evaluator, by == "key" ? key : value, flag(bound[0])),
                     evaluator.make_list({key, value}, ValueKind::kTuple)});
  }
  return evaluator.make_list(sorted(evaluator, std::move(pairs), flag(bound[2])));
}

Value sort(Evaluator& evaluator, const Value& input, const BoundArguments& bound) {
  std::vector<Value> paths;
  if (bound[2] && bound[2]->is(ValueKind::kString)) {
    std::string_view text = bound[2]->as_text();
    for (size_t comma = 0; comma != std::string_view::npos;
         text = comma == std::string_view::npos ? text : text.substr(comma + 1)) {
      comma = text.find(',');
      paths.push_back(Value::text(std::string(text.substr(0, comma))));
    }
  } else {
    paths.push_back(bound[2] ? *bound[2] : Value::none());
  }
  std::vector<KeyedValue> keyed;
  for (auto& item : elements(input, evaluator.budget())) {
    std::vector<Value> keys;
    for (const auto& path : paths) keys.push_back(folded(evaluator, look_up(evaluator, item, path), flag(bound[1])));
    keyed.push_back({keys.size() == 1 ? keys[0] : evaluator.make_list(std::move(keys)), std::move(item)});
  }
  return evaluator.make_list(sorted(evaluator, std::move(keyed), flag(bound[0])));
}

Value unique(Evaluator& evaluator, const Value& input, const BoundArguments& bound) {
  Dict seen;
  std::vector<Value> kept;
  for (auto& item : elements(input, evaluator.budget())) {
    const Value key = folded(evaluator, look_up(evaluator, item, bound[1] ? *bound[1] : Value::none()), flag(bound[0]));
    if (seen.find(key, evaluator.budget())) continue;
    seen.set(key, Value::none(), evaluator.budget());
    kept.push_back(std::move(item));
  }
  return evaluator.make_list(std::move(kept), ValueKind::kGenerator);
}

template <bool kMax>
Value extreme(Evaluator& evaluator, const Value& input, const BoundArguments& bound) {
  std::optional<KeyedValue> best;
  for (auto& item : elements(input, evaluator.budget())) {
    Value key = folded(evaluator, look_up(evaluator, item, bound[1] ? *bound[1] : Value::none()), flag(bound[0]));
    const bool better =
        !best || (kMax ? less(best->key, key, evaluator.budget()) : less(key, best->key, evaluator.budget()));
    if (better) best = KeyedValue{std::move(key), std::move(item)};
  }
  return best ? best->value : Value::undefined("the sequence is empty");
}

Value sum(Evaluator& evaluator, const Value& input, const BoundArguments& bound) {
  Value total = bound[1] ? *bound[1] : Value::integer(0);
  if (total.is(ValueKind::kString)) fail("sum does not join strings");
  for (auto& item : elements(input, evaluator.budget())) {
    total = binary(evaluator, Operator::kAdd, total, look_up(evaluator, item, bound[0] ? *bound[0] : Value::none()));
  }
  return total;
}

Value join(Evaluator& evaluator, const Value& input, const BoundArguments& bound) {
  const std::string between = bound[0] ? evaluator.text_of(*bound[0]) : "";
  std::string out;
  bool first = true;
  for (const auto& item : elements(input, evaluator.budget())) {
    if (!first) out += between;
    first = false;
    out += evaluator.text_of(bound[1] ? look_up(evaluator, item, *bound[1]) : item);
    evaluator.budget().check_size(out.size());
  }
  return evaluator.make_text(std::move(out));
}

Value first(Evaluator& evaluator, const Value& input, const BoundArguments&) {
  if (input.is(ValueKind::kGenerator)) {
    auto& generator = input.get<List>();
    return generator.consumed < generator.items.size() ? generator.items[generator.consumed++]
                                                       : Value::undefined("there is no first item");
  }
  auto all = elements(input, evaluator.budget());
  return all.empty() ? Value::undefined("there is no first item") : all.front();
}

Value last(Evaluator& evaluator, const Value& input, const BoundArguments&) {
  if (input.is(ValueKind::kGenerator)) fail("a generator cannot be reversed");
  auto all = elements(input, evaluator.budget());
  return all.empty() ? Value::undefined("there is no last item") : all.back();
}

Value reverse(Evaluator& evaluator, const Value& input, const BoundArguments&) {
  if (input.is(ValueKind::kString)) return slice(evaluator, input, Value::none(), Value::none(), Value::integer(-1));
  auto all = elements(input, evaluator.budget());
  std::ranges::reverse(all);
  return evaluator.make_list(std::move(all),
                             input.is(ValueKind::kGenerator) ? ValueKind::kList : ValueKind::kGenerator);
}

Value map(Evaluator& evaluator, const Value& input, const Arguments& arguments) {
  std::vector<Value> mapped;
  if (!truthy(input)) return evaluator.make_list({}, ValueKind::kGenerator);  // none is empty, as in Jinja2
  if (arguments.positional.empty() && !arguments.named.empty()) {
    const auto bound = bind("map", arguments, {"attribute", "default"}, 1);
    for (auto& item : elements(input, evaluator.budget())) {
      mapped.push_back(look_up(evaluator, std::move(item), *bound[0], bound[1]));
    }
  } else {
    if (arguments.positional.empty() || !arguments.positional[0].is(ValueKind::kString)) {
      fail("map wants the name of a filter");
    }
    const Arguments rest{{arguments.positional.begin() + 1, arguments.positional.end()}, arguments.named};
    for (const auto& item : elements(input, evaluator.budget())) {
      mapped.push_back(apply_filter(evaluator, arguments.positional[0].as_text(), item, rest));
    }
  }
  return evaluator.make_list(std::move(mapped), ValueKind::kGenerator);
}

// The filters select and reject (kAttribute is false), selectattr and rejectattr.
template <bool kKeep, bool kAttribute>
Value select(Evaluator& evaluator, const Value& input, const Arguments& arguments) {
  constexpr size_t kTest = kAttribute ? 1 : 0;
  if (!truthy(input)) return evaluator.make_list({}, ValueKind::kGenerator);  // none is empty, as in Jinja2
  const auto& given = arguments.positional;
  if (kAttribute && given.empty()) fail("the filter wants the name of an attribute");
  if (given.size() > kTest && !given[kTest].is(ValueKind::kString)) fail("the filter wants the name of a test");
  Arguments rest;
  if (given.size() > kTest) rest = {{given.begin() + kTest + 1, given.end()}, arguments.named};
  std::vector<Value> kept;
  for (auto& item : elements(input, evaluator.budget())) {
    const Value probe = kAttribute ? look_up(evaluator, item, given[0]) : item;
    const bool holds =
        given.size() > kTest ? apply_test(evaluator, given[kTest].as_text(), probe, rest) : truthy(probe);
    if (holds == kKeep) kept.push_back(std::move(item));
  }
  return evaluator.make_list(std::move(kept), ValueKind::kGenerator);
}

// The filter `attr`: an attribute, but not an entry of a dict.
Value attribute_only(Evaluator& evaluator, const Value& input, const BoundArguments& bound) {
  const std::string name = evaluator.text_of(*bound[0]);
  if (input.is(ValueKind::kDict) && !has_method(input, name)) {
    return Value::undefined(fmt::format("a dict has no attribute '{}'", name.substr(0, 80)));
  }
  return evaluator.attribute(input, name);
}

}  // namespace

const BuiltinTable& sequence_filters() {
  static const BuiltinTable kTable = {
      {"attr", {attribute_only, {"name"}, 1}},
      {"count", {length}},
      {"dictsort", {dict_sort, {"case_sensitive", "by", "reverse"}}},
      {"first", {first}},
      {"items", {items}},
      {"join", {join, {"d", "attribute"}}},
      {"last", {last}},
      {"length", {length}},
      {"list", {list}},
      {"map", {.call_with_arguments = map}},
      {"max", {extreme<true>, {"case_sensitive", "attribute"}}},
      {"min", {extreme<false>, {"case_sensitive", "attribute"}}},
      {"reject", {.call_with_arguments = select<false, false>}},
      {"rejectattr", {.call_with_arguments = select<false, true>}},
      {"reverse", {reverse}},
      {"select", {.call_with_arguments = select<true, false>}},
      {"selectattr", {.call_with_arguments = select<true, true>}},
      {"sort", {sort, {"reverse", "case_sensitive", "attribute"}}},
      {"sum", {sum, {"attribute", "start"}}},
      {"unique", {unique, {"case_sensitive", "attribute"}}},
  };
  return kTable;
}

}  // namespace tessera::text::jinja
