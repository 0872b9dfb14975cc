// The values of a chat template: Python's, as far as Jinja2 templates can make and see them.
//
//   Value greeting = Value::text("hello");
//   if (truthy(greeting)) out += to_text(greeting, budget);
//
// Integers beyond 64 bits are printed and compared; arithmetic with them is a failure. Values are immutable and shared,
// but for namespaces and the position of generators and loops; the sandbox that is matched here forbids changing lists
// and dicts. A value belongs to one render and one thread. Containers carry the depth of what they hold, so that
// nothing that recurses over a value can run out of stack.
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

// Anything that ends a render or a parse; the public layer adds the template's name and the line.
struct Failure {
  std::string message;
};

template <class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw Failure{fmt::format(format, std::forward<Args>(args)...)};
}

// What a render may still use. Every operation pays for what it produces or scans.
struct Budget {
  size_t steps_left = 0;
  size_t max_bytes = 0;
  int max_depth = 0;

  void charge(size_t bytes);            // one step for each 64 bytes, and one
  void check_size(size_t bytes) const;  // of one string or list
  void check_depth(int depth) const;    // of one value
};

enum class Kind : uint8_t {
  kUndefined,
  kNone,
  kBool,
  kInt,
  kBigInt,  // an integer that 64 bits do not hold: its digits
  kFloat,
  kString,
  kList,
  kTuple,
  kRange,
  kView,       // dict.keys(), .values(), .items()
  kGenerator,  // what map, select, items, ... give: one pass
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
struct Loop;
struct Macro;
struct Function;

class Value {
 public:
  Value() = default;                              // undefined
  static Value undefined(std::string_view hint);  // the hint says in errors what was not defined
  static Value none() { return Value(Kind::kNone); }
  static Value boolean(bool value) { return Value(Kind::kBool, value); }
  static Value integer(int64_t value) { return Value(Kind::kInt, value); }
  static Value big_integer(std::string digits);  // decimal, of a number beyond 64 bits
  static Value real(double value);
  static Value text(std::string bytes, bool markup = false);
  static Value list(std::vector<Value> items, Kind kind = Kind::kList);  // kList, kTuple, kRange, kView or kGenerator
  static Value dict(std::shared_ptr<const Dict> dict);
  template <class Object>
  static Value object(Kind kind, std::shared_ptr<Object> object) {
    Value value(kind);
    value.object_ = std::move(object);
    return value;
  }

  Kind kind() const { return kind_; }
  bool is(Kind kind) const { return kind_ == kind; }
  bool is_number() const { return is_integral() || kind_ == Kind::kFloat || kind_ == Kind::kBigInt; }
  // As an int64_t.
  bool is_integral() const { return kind_ == Kind::kInt || kind_ == Kind::kBool; }
  bool is_sequence() const { return kind_ >= Kind::kList && kind_ <= Kind::kGenerator; }  // kept as a List
  bool is_sized_sequence() const { return is_sequence() && kind_ != Kind::kGenerator; }
  bool is_markup() const { return markup_; }

  int64_t as_int() const { return integer_; }  // of kInt and kBool
  double as_double() const;                    // of a number
  const std::string& as_text() const;          // of kString and kBigInt
  bool is_ascii() const;                       // of kString
  const std::string& hint() const;             // of kUndefined
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
  explicit Value(Kind kind, int64_t integer = 0) : kind_(kind), integer_(integer) {}
  Kind kind_ = Kind::kUndefined;
  bool markup_ = false;
  union {
    int64_t integer_ = 0;
    double real_;
  };
  std::shared_ptr<void> object_;
};

// Hashes are made with the value, so that asking for one costs nothing however a value is built of shared parts.
struct Text {
  std::string bytes;
  bool ascii = true;
  size_t hash = 0;
};

struct List {
  std::vector<Value> items;
  size_t consumed = 0;  // of a generator
  int depth = 1;
  size_t hash = 0;                   // of a tuple
  const char* unhashable = nullptr;  // the type that keeps a tuple from being a key
};

// Insertion-ordered, keys of any hashable kind.
struct Dict {
  std::vector<std::pair<Value, Value>> entries;
  int depth = 1;

  const Value* find(const Value& key, Budget& budget) const;
  void set(const Value& key, Value value, Budget& budget);  // an existing key keeps its place

 private:
  size_t position(const Value& key, size_t hash, Budget& budget) const;
  std::unordered_multimap<size_t, size_t> index_;  // hash to position
};

struct Namespace {
  std::shared_ptr<Dict> attributes = std::make_shared<Dict>();
};

// A bound method or a global function.
struct Function {
  std::string name;
  Value self;  // undefined for a global
};

const char* type_name(const Value& value);  // Python's: "str", "NoneType", ...
bool truthy(const Value& value);
bool equal(const Value& left, const Value& right, Budget& budget);
bool less(const Value& left, const Value& right, Budget& budget);  // failure where Python raises TypeError
size_t hash_of(const Value& key);                                  // failure when not hashable
bool contains(const Value& container, const Value& item, Budget& budget);
// The elements in order, as `for` sees them; a generator is used up. Failure for what cannot be iterated.
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
