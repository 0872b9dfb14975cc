// The values of a chat template. They behave like the Python values that Jinja2 templates can create and use.
//
//   Value greeting = Value::text("hello");
//   if (truthy(greeting)) out += to_text(greeting, budget);
//
// Integers beyond 64 bits can be printed and compared; arithmetic with them is a failure. Values are immutable and
// shared, except for namespaces and the positions of generators and loops: like Jinja2's immutable sandbox, templates
// cannot change lists and dicts. A value belongs to one render and one thread. A container stores its nesting depth,
// and this depth is limited, so recursion over a value cannot overflow the stack.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tessera::text::jinja {

// An error that ends a render. ChatTemplate converts it to an Error with the template's name and the line.
struct RenderError {
  std::string message;
};

template <class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw RenderError{fmt::format(format, std::forward<Args>(args)...)};
}

// The limits of a render. Every operation charges the bytes that it produces or scans.
struct Budget {
  size_t steps_left = 0;
  size_t max_bytes = 0;
  int max_depth = 0;

  void charge(size_t bytes);            // charges 1 + bytes / 64 steps; failure when steps_left has fewer
  void check_size(size_t bytes) const;  // failure when one string or list is larger than max_bytes
  void check_depth(int depth) const;    // failure when one value is nested deeper than max_depth
};

enum class ValueKind : uint8_t {
  kUndefined,
  kNone,
  kBool,
  kInt,
  kBigInt,  // an integer beyond 64 bits, stored as its decimal digits
  kFloat,
  kString,
  kList,
  kTuple,
  kRange,
  kView,       // dict.keys(), .values(), .items()
  kGenerator,  // the result of the filters map, select, items, ...; it can be read once
  kDict,
  kNamespace,
  kLoop,
  kMacro,
  kFunction,
};

struct Text;
struct List;
struct Dict;
struct Namespace;
struct LoopState;
struct Macro;
struct Function;

class Value {
 public:
  Value() = default;                              // undefined
  static Value undefined(std::string_view hint);  // the hint is the error message when the value is used
  static Value none() { return Value(ValueKind::kNone); }
  static Value boolean(bool value) { return Value(ValueKind::kBool, value); }
  static Value integer(int64_t value) { return Value(ValueKind::kInt, value); }
  static Value big_integer(std::string digits);  // decimal digits of a number beyond 64 bits
  static Value real(double value);
  static Value text(std::string bytes, bool markup = false);
  static Value list(std::vector<Value> items,
                    ValueKind kind = ValueKind::kList);  // kList, kTuple, kRange, kView or kGenerator
  static Value dict(std::shared_ptr<const Dict> dict);
  template <class Object>
  static Value object(ValueKind kind, std::shared_ptr<Object> object) {
    Value value(kind);
    value.object_ = std::move(object);
    return value;
  }

  ValueKind kind() const { return kind_; }
  bool is(ValueKind kind) const { return kind_ == kind; }
  bool is_number() const { return is_integral() || kind_ == ValueKind::kFloat || kind_ == ValueKind::kBigInt; }
  // Whether the value is stored as an int64_t.
  bool is_integral() const { return kind_ == ValueKind::kInt || kind_ == ValueKind::kBool; }
  bool is_sequence() const {
    return kind_ >= ValueKind::kList && kind_ <= ValueKind::kGenerator;
  }  // the value is stored as a List
  bool is_sized_sequence() const { return is_sequence() && kind_ != ValueKind::kGenerator; }
  bool is_markup() const { return markup_; }

  // Each accessor may be called only for the kinds in its comment.
  int64_t as_int() const { return integer_; }  // kInt and kBool
  double as_double() const;                    // all numbers
  const std::string& as_text() const;          // kString and kBigInt
  bool is_ascii() const;                       // kString
  const std::string& hint() const;             // kUndefined
  const std::vector<Value>& items() const;
  template <class Object>
  Object& get() const {
    return *static_cast<Object*>(object_.get());
  }
  template <class Object>
  std::shared_ptr<Object> share() const {
    return std::static_pointer_cast<Object>(object_);
  }
  const void* identity() const { return object_.get(); }
  int depth() const;

 private:
  explicit Value(ValueKind kind, int64_t integer = 0) : kind_(kind), integer_(integer) {}
  ValueKind kind_ = ValueKind::kUndefined;
  bool markup_ = false;
  union {
    int64_t integer_ = 0;
    double real_;
  };
  std::shared_ptr<void> object_;
};

// The hash is computed when the value is created, so hash_of() takes constant time for a nested value, too.
struct Text {
  std::string bytes;
  bool ascii = true;
  size_t hash = 0;
};

struct List {
  std::vector<Value> items;
  size_t consumed = 0;  // for a generator: the number of items already read
  int depth = 1;
  size_t hash = 0;                   // for a tuple
  const char* unhashable = nullptr;  // for a tuple: the type of an item that cannot be hashed; null when all can
};

// A dict in insertion order. Keys are values of any hashable kind.
struct Dict {
  std::vector<std::pair<Value, Value>> entries;
  int depth = 1;

  const Value* find(const Value& key, Budget& budget) const;
  void set(const Value& key, Value value, Budget& budget);  // an existing key keeps its place

 private:
  size_t position(const Value& key, size_t hash, Budget& budget) const;
  std::unordered_multimap<size_t, size_t> index_;  // hash to index in `entries`; used from kIndexedFrom entries on
};

struct Namespace {
  std::shared_ptr<Dict> attributes = std::make_shared<Dict>();
};

// A bound method or a global function.
struct Function {
  std::string name;
  Value self;  // undefined for a global
};

const char* type_name(const Value& value);  // the name in Python: "str", "NoneType", ...
bool truthy(const Value& value);
bool equal(const Value& left, const Value& right, Budget& budget);
bool less(const Value& left, const Value& right, Budget& budget);  // failure where Python raises TypeError
size_t hash_of(const Value& key);                                  // failure when not hashable
bool contains(const Value& container, const Value& item, Budget& budget);
// The elements over which `for` iterates, in order. A generator is empty afterwards. RenderError for a value that is
// not iterable.
std::vector<Value> elements(const Value& value, Budget& budget);
int64_t length_of(const Value& value, Budget& budget);

std::string to_text(const Value& value, Budget& budget);  // str(value)
std::string to_repr(const Value& value, Budget& budget);  // repr(value)
std::string repr_of_double(double value);

struct JsonStyle {
  bool ascii = false;
  bool sort_keys = false;
  bool pretty = false;
  std::string indent;
  std::string item_separator = ", ";
  std::string key_separator = ": ";
};
std::string to_json(const Value& value, const JsonStyle& style, Budget& budget);  // json.dumps

}  // namespace tessera::text::jinja
