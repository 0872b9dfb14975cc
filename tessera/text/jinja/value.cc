#include "tessera/text/jinja/value.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>

#include "tessera/text/jinja/evaluator.h"
#include "tessera/text/jinja/marks.h"
#include "tessera/text/jinja/search.h"
#include "tessera/text/jinja/unicode.h"

namespace tessera::text::jinja {

void Budget::charge(size_t bytes) {
  const size_t steps = 1 + bytes / 64;
  if (steps > steps_left) fail("the template takes more than the allowed number of steps. Does it loop?");
  steps_left -= steps;
}

void Budget::check_size(size_t bytes) const {
  if (bytes > max_bytes) fail("the template makes a value of more than {} bytes", max_bytes);
}

void Budget::check_depth(int depth) const {
  if (depth > max_depth) fail("values are nested deeper than {}", max_depth);
}

Value Value::undefined(std::string_view hint) {
  Value value;
  value.object_ = std::make_shared<std::string>(hint);
  return value;
}

Value Value::big_integer(std::string digits) {
  Value value = text(std::move(digits));
  value.kind_ = ValueKind::kBigInt;
  return value;
}

Value Value::real(double number) {
  Value value(ValueKind::kFloat);
  value.real_ = number;
  return value;
}

Value Value::text(std::string bytes, bool markup) {
  Value value(ValueKind::kString);
  value.markup_ = markup;
  const bool ascii = is_ascii_only(bytes);
  const size_t hash = std::hash<std::string>{}(bytes);
  value.object_ = std::make_shared<Text>(Text{std::move(bytes), ascii, hash});
  return value;
}

namespace {
// The name of the type because of which the value cannot be a dict key; null when it can be a key.
const char* unhashable_part(const Value& value) {
  if (value.is(ValueKind::kTuple)) return value.get<List>().unhashable;
  return value.is(ValueKind::kList) || value.is(ValueKind::kDict) ? type_name(value) : nullptr;
}
}  // namespace

// Computes the depth of the list, and for a tuple also its hash, from the depths and hashes of the items. So no
// function has to recurse over a value to find its depth or hash.
Value Value::list(std::vector<Value> items, ValueKind kind) {
  auto list = std::make_shared<List>();
  list->items = std::move(items);
  list->hash = 7;
  for (const auto& item : list->items) {
    list->depth = std::max(list->depth, item.depth() + 1);
    if (kind != ValueKind::kTuple || list->unhashable) continue;
    list->unhashable = unhashable_part(item);
    if (!list->unhashable) list->hash = list->hash * 1'000'003 + hash_of(item);
  }
  return object(kind, std::move(list));
}

Value Value::dict(std::shared_ptr<const Dict> dict) {
  return object(ValueKind::kDict, std::const_pointer_cast<Dict>(std::move(dict)));
}

double Value::as_double() const {
  if (kind_ == ValueKind::kBigInt) return std::strtod(as_text().c_str(), nullptr);
  return kind_ == ValueKind::kFloat ? real_ : static_cast<double>(integer_);
}

const std::string& Value::as_text() const { return get<Text>().bytes; }
bool Value::is_ascii() const { return get<Text>().ascii; }

const std::string& Value::hint() const {
  static const std::string kUnknown = "the value is undefined";
  return object_ ? get<std::string>() : kUnknown;
}

const std::vector<Value>& Value::items() const { return get<List>().items; }

int Value::depth() const {
  if (is_sequence()) return get<List>().depth;
  switch (kind_) {
    case ValueKind::kDict:
      return get<Dict>().depth;
    case ValueKind::kNamespace:
      return get<Namespace>().attributes->depth + 1;
    case ValueKind::kLoop:
      return get<LoopState>().depth_of_items + 1;
    case ValueKind::kFunction:
      return get<Function>().self.depth() + 1;
    default:
      return 0;
  }
}

namespace {
constexpr size_t kIndexedFrom = 8;  // a dict with fewer entries has no index and is scanned
constexpr size_t kAbsent = ~size_t{0};
}  // namespace

// Entries with an equal hash are compared with equal(), and each comparison is charged to `budget`, the limits of the
// render. So a template that makes many keys with the same hash fails when the budget is used up.
size_t Dict::position(const Value& key, size_t hash, Budget& budget) const {
  if (entries.size() < kIndexedFrom) {
    for (size_t i = 0; i < entries.size(); ++i) {
      if (hash_of(entries[i].first) == hash && equal(entries[i].first, key, budget)) return i;
    }
    return kAbsent;
  }
  const auto [first, last] = index_.equal_range(hash);
  for (auto at = first; at != last; ++at) {
    if (equal(entries[at->second].first, key, budget)) return at->second;
  }
  return kAbsent;
}

const Value* Dict::find(const Value& key, Budget& budget) const {
  const size_t at = position(key, hash_of(key), budget);
  return at == kAbsent ? nullptr : &entries[at].second;
}

void Dict::set(const Value& key, Value value, Budget& budget) {
  const size_t hash = hash_of(key);
  depth = std::max({depth, key.depth() + 1, value.depth() + 1});
  const size_t at = position(key, hash, budget);
  if (at != kAbsent) {
    entries[at].second = std::move(value);
    return;
  }
  entries.emplace_back(key, std::move(value));
  if (entries.size() == kIndexedFrom) {
    for (size_t i = 0; i < entries.size(); ++i) index_.emplace(hash_of(entries[i].first), i);
  } else if (entries.size() > kIndexedFrom) {
    index_.emplace(hash, entries.size() - 1);
  }
}

const char* type_name(const Value& value) {
  static constexpr const char* kNames[] = {"Undefined", "NoneType",  "bool",        "int",   "int",        "float",
                                           "str",       "list",      "tuple",       "range", "dict_items", "generator",
                                           "dict",      "Namespace", "LoopContext", "Macro", "function"};
  return kNames[static_cast<size_t>(value.kind())];
}

bool truthy(const Value& value) {
  switch (value.kind()) {
    case ValueKind::kUndefined:
    case ValueKind::kNone:
      return false;
    case ValueKind::kBool:
    case ValueKind::kInt:
      return value.as_int() != 0;
    case ValueKind::kFloat:
      return value.as_double() != 0;
    case ValueKind::kString:
      return !value.as_text().empty();
    case ValueKind::kDict:
      return !value.get<Dict>().entries.empty();
    default:
      return !value.is_sized_sequence() || !value.items().empty();
  }
}

namespace {
bool equal_lists(const std::vector<Value>& left, const std::vector<Value>& right, Budget& budget) {
  if (left.size() != right.size()) return false;
  for (size_t i = 0; i < left.size(); ++i) {
    if (!equal(left[i], right[i], budget)) return false;
  }
  return true;
}

bool equal_dicts(const Dict& left, const Dict& right, Budget& budget) {
  if (left.entries.size() != right.entries.size()) return false;
  for (const auto& [key, value] : left.entries) {
    const Value* other = right.find(key, budget);
    if (!other || !equal(value, *other, budget)) return false;
  }
  return true;
}

// kBigInt holds only integers beyond 64 bits, so it never equals a kInt. A comparison with a float compares doubles.
bool equal_numbers(const Value& left, const Value& right) {
  if (left.is(ValueKind::kBigInt) && right.is(ValueKind::kBigInt)) return left.as_text() == right.as_text();
  if (left.is(ValueKind::kBigInt) && right.is_integral()) return false;
  if (right.is(ValueKind::kBigInt) && left.is_integral()) return false;
  if (left.is_integral() && right.is_integral()) return left.as_int() == right.as_int();
  return left.as_double() == right.as_double();
}

bool equal_but_for_marks(const std::string& left, const std::string& right, Budget& budget) {
  budget.charge((left.size() + right.size()) / 8);
  if (left.size() == right.size() && left == right) return true;
  const bool marked = has_marks(left) || has_marks(right);
  return marked && without_marks(left) == without_marks(right);
}

bool is_negative(const Value& integer) {
  return integer.is(ValueKind::kBigInt) ? integer.as_text()[0] == '-' : integer.as_int() < 0;
}

// Compares by sign, then by magnitude: a kInt is nearer to zero than any kBigInt, and of two kBigInt with the same sign
// the one with fewer digits, or at equal length the smaller string, is nearer.
bool less_integers(const Value& left, const Value& right) {
  if (left.is_integral() && right.is_integral()) return left.as_int() < right.as_int();
  if (is_negative(left) != is_negative(right)) return is_negative(left);
  bool nearer_to_zero = left.is_integral();
  if (left.is(ValueKind::kBigInt) && right.is(ValueKind::kBigInt)) {
    const std::string &a = left.as_text(), &b = right.as_text();
    if (a == b) return false;
    nearer_to_zero = a.size() != b.size() ? a.size() < b.size() : a < b;
  }
  return nearer_to_zero != is_negative(left);
}
}  // namespace

// Python's ==. Values of different kinds are never equal, except numbers. The same object is equal to itself without a
// comparison of its items. Each comparison is charged to `budget`, the limits of the render.
bool equal(const Value& left, const Value& right, Budget& budget) {
  budget.charge(0);
  if (left.is_number() && right.is_number()) return equal_numbers(left, right);
  if (left.kind() != right.kind()) return false;
  switch (left.kind()) {
    case ValueKind::kUndefined:
    case ValueKind::kNone:
      return true;
    case ValueKind::kString:
      if (!left.is_ascii() || !right.is_ascii()) return equal_but_for_marks(left.as_text(), right.as_text(), budget);
      if (left.as_text().size() != right.as_text().size()) return false;
      budget.charge(left.as_text().size() / 8);
      return left.as_text() == right.as_text();
    case ValueKind::kList:
    case ValueKind::kTuple:
    case ValueKind::kRange:
      return left.identity() == right.identity() || equal_lists(left.items(), right.items(), budget);
    case ValueKind::kDict:
      return left.identity() == right.identity() || equal_dicts(left.get<Dict>(), right.get<Dict>(), budget);
    default:
      return left.identity() == right.identity();
  }
}

bool less(const Value& left, const Value& right, Budget& budget) {
  budget.charge(0);
  if (left.is_number() && right.is_number()) {
    if (!left.is(ValueKind::kFloat) && !right.is(ValueKind::kFloat)) return less_integers(left, right);
    return left.as_double() < right.as_double();
  }
  if (left.is(ValueKind::kUndefined)) fail("{}", left.hint());
  if (right.is(ValueKind::kUndefined)) fail("{}", right.hint());
  if (left.kind() == right.kind() && left.is(ValueKind::kString)) {
    budget.charge(std::min(left.as_text().size(), right.as_text().size()) / 8);
    return left.as_text() < right.as_text();
  }
  if (left.kind() == right.kind() && (left.is(ValueKind::kList) || left.is(ValueKind::kTuple))) {
    const auto& a = left.items();
    const auto& b = right.items();
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
      if (!equal(a[i], b[i], budget)) return less(a[i], b[i], budget);
    }
    return a.size() < b.size();
  }
  fail("'<' not supported between '{}' and '{}'", type_name(left), type_name(right));
}

// Numbers that are equal have equal hashes (1, 1.0 and True), because all are hashed as doubles.
size_t hash_of(const Value& key) {
  switch (key.kind()) {
    case ValueKind::kNone:
      return 1;
    case ValueKind::kBool:
    case ValueKind::kInt:
      return std::hash<double>{}(static_cast<double>(key.as_int()));
    case ValueKind::kBigInt:
    case ValueKind::kFloat:
      return std::hash<double>{}(key.as_double());
    case ValueKind::kString:
      return key.get<Text>().hash;
    case ValueKind::kTuple:
    case ValueKind::kList:
    case ValueKind::kDict:
      if (const char* part = unhashable_part(key)) fail("unhashable type: '{}'", part);
      return key.get<List>().hash;
    default:
      return std::hash<const void*>{}(key.identity());
  }
}

bool contains(const Value& container, const Value& item, Budget& budget) {
  switch (container.kind()) {
    case ValueKind::kUndefined:
      return false;
    case ValueKind::kString:
      if (!item.is(ValueKind::kString)) fail("'in <string>' requires string as left operand, not {}", type_name(item));
      if (!container.is_ascii() && has_marks(container.as_text())) {
        budget.charge(container.as_text().size());
        const auto plain = without_marks(container.as_text());
        return SubstringSearch(plain, item.as_text(), budget).find() != std::string::npos;
      }
      return SubstringSearch(container.as_text(), item.as_text(), budget).find() != std::string::npos;
    case ValueKind::kDict:
      budget.charge(0);
      return container.get<Dict>().find(item, budget) != nullptr;
    default:
      for (const auto& element : elements(container, budget)) {
        if (equal(element, item, budget)) return true;
      }
      return false;
  }
}

std::vector<Value> elements(const Value& value, Budget& budget) {
  std::vector<Value> result;
  switch (value.kind()) {
    case ValueKind::kUndefined:
      return result;
    case ValueKind::kString:
      budget.charge(value.as_text().size() * sizeof(Value));
      for_each_code_point(value.as_text(),
                          [&](std::string_view one, int32_t) { result.push_back(Value::text(std::string(one))); });
      return result;
    case ValueKind::kDict:
      budget.charge(value.get<Dict>().entries.size() * sizeof(Value));
      for (const auto& entry : value.get<Dict>().entries) result.push_back(entry.first);
      return result;
    case ValueKind::kGenerator: {
      auto& list = value.get<List>();
      budget.charge((list.items.size() - list.consumed) * sizeof(Value));
      result.assign(list.items.begin() + static_cast<std::ptrdiff_t>(list.consumed), list.items.end());
      list.consumed = list.items.size();
      return result;
    }
    default:
      if (!value.is_sized_sequence()) fail("'{}' object is not iterable", type_name(value));
      budget.charge(value.items().size() * sizeof(Value));
      return value.items();
  }
}

int64_t length_of(const Value& value, Budget& budget) {
  switch (value.kind()) {
    case ValueKind::kUndefined:
      return 0;
    case ValueKind::kString:
      if (value.is_ascii()) return static_cast<int64_t>(value.as_text().size());
      budget.charge(value.as_text().size());
      return static_cast<int64_t>(count_code_points(value.as_text()));
    case ValueKind::kDict:
      return static_cast<int64_t>(value.get<Dict>().entries.size());
    default:
      if (!value.is_sized_sequence()) fail("object of type '{}' has no len()", type_name(value));
      return static_cast<int64_t>(value.items().size());
  }
}

}  // namespace tessera::text::jinja
