// The methods of dicts, lists and tuples, the table of all methods, and the global functions.
#include <algorithm>
#include <ctime>

#include "tessera/text/jinja/builtin.h"

namespace tessera::text::jinja {
namespace {

enum class DictViewKind { kKeys, kValues, kItems };

template <DictViewKind kKind>
Value dict_view(Evaluator& evaluator, const Value& self, const BoundArguments&) {
  std::vector<Value> items;
  for (const auto& [key, value] : self.get<Dict>().entries) {
    items.push_back(kKind == DictViewKind::kKeys     ? key
                    : kKind == DictViewKind::kValues ? value
                                                     : evaluator.make_list({key, value}, ValueKind::kTuple));
  }
  return evaluator.make_list(std::move(items), ValueKind::kView);
}

Value dict_get(Evaluator& evaluator, const Value& self, const Arguments& arguments) {
  if (!arguments.named.empty()) fail("dict.get takes no keyword arguments");
  const auto bound = bind("dict.get", arguments, {"key", "default"}, 1);
  const Value* found = self.get<Dict>().find(*bound[0], evaluator.budget());
  return found ? *found : bound[1] ? *bound[1] : Value::none();
}

Value copy_of(Evaluator& evaluator, const Value& self, const BoundArguments&) {
  if (self.is(ValueKind::kDict)) return evaluator.make_dict(std::make_shared<Dict>(self.get<Dict>()));
  return evaluator.make_list(self.items());
}

Value count_item(Evaluator& evaluator, const Value& self, const BoundArguments& bound) {
  int64_t count = 0;
  for (const auto& item : self.items()) count += equal(item, *bound[0], evaluator.budget());
  return Value::integer(count);
}

Value index_of_item(Evaluator& evaluator, const Value& self, const BoundArguments& bound) {
  for (size_t i = 0; i < self.items().size(); ++i) {
    if (equal(self.items()[i], *bound[0], evaluator.budget())) return Value::integer(static_cast<int64_t>(i));
  }
  fail("the value is not in the list");
}

const BuiltinTable& methods_of(const Value& self) {
  static const BuiltinTable kDict = {{"get", {.call_with_arguments = dict_get}},
                                     {"items", {dict_view<DictViewKind::kItems>}},
                                     {"keys", {dict_view<DictViewKind::kKeys>}},
                                     {"values", {dict_view<DictViewKind::kValues>}},
                                     {"copy", {copy_of}}};
  static const BuiltinTable kList = {
      {"count", {count_item, {"value"}, 1}}, {"index", {index_of_item, {"value"}, 1}}, {"copy", {copy_of}}};
  static const BuiltinTable kTuple = {{"count", {count_item, {"value"}, 1}}, {"index", {index_of_item, {"value"}, 1}}};
  static const BuiltinTable kNone;
  switch (self.kind()) {
    case ValueKind::kString:
      return text_methods();
    case ValueKind::kDict:
      return kDict;
    case ValueKind::kList:
      return kList;
    case ValueKind::kTuple:
    case ValueKind::kRange:
      return kTuple;
    default:
      return kNone;
  }
}

}  // namespace

bool has_method(const Value& self, std::string_view name) { return methods_of(self).contains(name); }

// The methods that change a dict or a list. Jinja2's immutable sandbox forbids them, too.
bool is_forbidden_method(const Value& self, std::string_view name) {
  static constexpr std::string_view kDict[] = {"clear", "pop", "popitem", "setdefault", "update"};
  static constexpr std::string_view kList[] = {"append", "clear", "pop",    "reverse",
                                               "insert", "sort",  "extend", "remove"};
  if (self.is(ValueKind::kDict)) return std::find(std::begin(kDict), std::end(kDict), name) != std::end(kDict);
  return self.is(ValueKind::kList) && std::find(std::begin(kList), std::end(kList), name) != std::end(kList);
}

Value call_method(Evaluator& evaluator, const Value& self, const std::string& name, const Arguments& arguments) {
  if (self.is(ValueKind::kString)) evaluator.budget().charge(self.as_text().size());
  return call_builtin(*methods_of(self).find(name), evaluator, self, arguments);
}

namespace {

Value make_range(Evaluator& evaluator, const Value&, const BoundArguments& bound) {
  constexpr uint64_t kMaxRange = 100'000;  // the limit of Jinja2's sandbox
  int64_t numbers[3] = {0, 0, 1};
  for (size_t i = 0; i < 3; ++i) {
    if (bound[i]) numbers[i] = integer_argument(*bound[i], "range");
  }
  const int64_t start = bound[1] ? numbers[0] : 0, stop = bound[1] ? numbers[1] : numbers[0], step = numbers[2];
  if (step == 0) fail("range wants a step that is not zero");
  std::vector<Value> items;
  for (int64_t at = start; step > 0 ? at < stop : at > stop;) {
    if (items.size() == kMaxRange) fail("a range of more than {} numbers", kMaxRange);
    items.push_back(Value::integer(at));
    if (__builtin_add_overflow(at, step, &at)) break;
  }
  return evaluator.make_list(std::move(items), ValueKind::kRange);
}

// The entries of dict(mapping_or_pairs, **named) and of namespace(...), which takes the same arguments.
std::shared_ptr<Dict> collected(Evaluator& evaluator, const Arguments& arguments) {
  auto dict = std::make_shared<Dict>();
  if (arguments.positional.size() > 1) fail("dict takes at most 1 argument, {} are given", arguments.positional.size());
  if (!arguments.positional.empty()) {
    const Value& from = arguments.positional[0];
    if (from.is(ValueKind::kDict)) {
      *dict = from.get<Dict>();
    } else {
      for (const auto& pair : elements(from, evaluator.budget())) {
        const auto parts = elements(pair, evaluator.budget());
        if (parts.size() != 2) fail("dict wants pairs, not {} values", parts.size());
        dict->set(parts[0], parts[1], evaluator.budget());
      }
    }
  }
  for (const auto& [name, value] : arguments.named) dict->set(Value::text(name), value, evaluator.budget());
  evaluator.budget().charge(dict->entries.size() * 2 * sizeof(Value));
  return dict;
}

Value make_dict(Evaluator& evaluator, const Value&, const Arguments& arguments) {
  return evaluator.make_dict(collected(evaluator, arguments));
}

Value make_namespace(Evaluator& evaluator, const Value&, const Arguments& arguments) {
  auto attributes = collected(evaluator, arguments);
  for (const auto& entry : attributes->entries) {
    if (entry.first.is(ValueKind::kString) && entry.first.as_text().starts_with('_')) {
      fail("a namespace cannot hold '{}'", entry.first.as_text().substr(0, 80));
    }
  }
  return evaluator.make_namespace(std::move(attributes));
}

// raise_exception(message) ends the render with an error. A chat template calls it when it does not accept the chat
// messages.
Value raise_exception(Evaluator& evaluator, const Value&, const BoundArguments& bound) {
  fail("the template refuses these messages: {}", evaluator.text_of(*bound[0]));
}

// strftime_now(format). Charges the Budget of the render for the largest output that the format can have, 64 bytes per
// byte of the format.
Value now(Evaluator& evaluator, const Value&, const BoundArguments& bound) {
  const std::string& format = text_argument(*bound[0], "strftime_now");
  if (format.size() > 1000) fail("strftime_now wants a format of at most 1000 bytes");
  evaluator.budget().charge(format.size() * 64);
  const std::time_t seconds = evaluator.time().value_or(std::time(nullptr));
  std::tm parts{};
  evaluator.time() ? ::gmtime_r(&seconds, &parts) : ::localtime_r(&seconds, &parts);
  std::string out(format.size() * 64 + 64, '\0');
  out.resize(format.empty() ? 0 : std::strftime(out.data(), out.size(), format.c_str(), &parts));
  return evaluator.make_text(std::move(out));
}

const BuiltinTable& globals() {
  static const BuiltinTable kTable = {{"dict", {.call_with_arguments = make_dict}},
                                      {"namespace", {.call_with_arguments = make_namespace}},
                                      {"raise_exception", {raise_exception, {"message"}, 1}},
                                      {"range", {make_range, {"start", "stop", "step"}, 1}},
                                      {"strftime_now", {now, {"format"}, 1}}};
  return kTable;
}

}  // namespace

bool is_global(std::string_view name) { return globals().contains(name); }

Value call_global(Evaluator& evaluator, const std::string& name, const Arguments& arguments) {
  return call_builtin(*globals().find(name), evaluator, Value(), arguments);
}

}  // namespace tessera::text::jinja
