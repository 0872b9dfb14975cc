// What a pickle holds, as data: nothing of it is ever executed.
//
//   const PickleValue root = unpickle(bytes, "model.pt");
//   for (size_t i = 0; i < root.dict_size(); ++i) use(root.key(i).as_text(), root.value(i));
//   if (value.is_object("torch.Size")) value.args()[0].items();
//
//   auto group = PickleValue::dict({{"lr", 0.1}, {"betas", PickleValue::tuple({0.9, 0.95})}});
//
// A class or function stands as kGlobal, what it makes as kObject: what is called, with which arguments, and the state
// set afterwards. What has a kind of its own (set, bytes, OrderedDict) has that kind however it was pickled. Copies
// share their nodes, which never change; no value contains itself. Thread-safe as const objects are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace tessera {

enum class PickleKind {
  kNone,
  kBool,
  kInt,
  kFloat,
  kText,  // UTF-8
  kBytes,
  kList,
  kTuple,
  kSet,
  kDict,        // keys of any kind, in insertion order
  kGlobal,      // torch.float32
  kObject,      // torch.Size((2, 3))
  kPersistent,  // a storage of torch.save, by its id
};

namespace detail {
struct PickleNode;
}

class PickleValue {
 public:
  using Items = std::vector<PickleValue>;
  using Pair = std::pair<PickleValue, PickleValue>;

  PickleValue() = default;  // None
  PickleValue(std::nullptr_t) {}
  PickleValue(bool value) : value_(value) {}
  PickleValue(int value) : value_(int64_t{value}) {}
  PickleValue(int64_t value) : value_(value) {}
  PickleValue(double value) : value_(value) {}
  // Error kFormat unless the text is UTF-8.
  PickleValue(const char* text) : PickleValue(std::string(text)) {}
  PickleValue(std::string text);
  static PickleValue bytes(std::string bytes);
  static PickleValue list(Items items);
  static PickleValue tuple(Items items);
  static PickleValue set(Items items);
  // Keys are not compared: no two may be equal.
  static PickleValue dict(std::vector<Pair> pairs);
  static PickleValue ordered_dict(std::vector<Pair> pairs);
  // "torch", "float32"
  static PickleValue global(std::string module, std::string name);
  // CLASS_OR_FUNCTION(*args)
  static PickleValue call(const PickleValue& callee, Items args);
  // An instance of a class that is made without a call; its state is a dict or tuple, None for no state.
  static PickleValue instance(const PickleValue& cls, PickleValue state);
  static PickleValue persistent(PickleValue id);

  PickleKind kind() const;
  bool is_none() const { return kind() == PickleKind::kNone; }
  // Of a global, and of an object made by it: "torch.float32", "collections.OrderedDict".
  bool is_global(std::string_view qualified_name) const;
  bool is_object(std::string_view qualified_name) const;

  // The value itself. Error kFormat when it is of another kind.
  bool as_bool() const;
  int64_t as_int() const;
  double as_float() const;
  const std::string& as_text() const;
  const std::string& as_bytes() const;
  std::span<const PickleValue> items() const;  // of a list, tuple or set
  size_t dict_size() const;
  const PickleValue& key(size_t index) const;
  const PickleValue& value(size_t index) const;
  // The value under a text key, null when there is none. Takes time linear in the dict.
  const PickleValue* find(std::string_view key) const;
  bool is_ordered_dict() const;
  std::string qualified_name() const;  // of a global or an object: "torch.Size"
  const std::string& global_module() const;
  const std::string& global_name() const;
  const PickleValue& callee() const;          // of an object: a global
  std::span<const PickleValue> args() const;  // of an object
  bool is_instance() const;                   // an object made by instance()
  const PickleValue& state() const;           // of an object or an ordered dict; None when none was set
  const PickleValue& persistent_id() const;

  // Equal for values that share their node; null for None, bools and numbers.
  const void* identity() const;

  // In a message: "None", "7", "'text'", "a list of 3 values", "a torch.Size".
  std::string describe() const;

 private:
  friend class Unpickler;
  friend bool same_pickle(const PickleValue& a, const PickleValue& b);
  explicit PickleValue(std::shared_ptr<detail::PickleNode> node) : value_(std::move(node)) {}
  const detail::PickleNode& node(PickleKind kind, const char* wanted) const;
  template <class T>
  T number(const char* wanted) const;
  std::variant<std::monostate, bool, int64_t, double, std::shared_ptr<detail::PickleNode>> value_;
};

// The same kinds, numbers (bitwise), text, and parts in the same order. Identity does not count.
bool same_pickle(const PickleValue& a, const PickleValue& b);

}  // namespace tessera
