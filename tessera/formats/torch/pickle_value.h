// The contents of a pickle as a tree of data. No code of a pickle is executed.
//
//   const PickleValue root = unpickle(bytes, "model.pt");
//   for (size_t i = 0; i < root.dict_size(); ++i) use(root.key(i).as_text(), root.value(i));
//   if (value.is_object("torch.Size")) value.args()[0].items();
//
//   auto group = PickleValue::dict({{"lr", 0.1}, {"betas", PickleValue::tuple({0.9, 0.95})}});
//
// A class or function is a kGlobal. The result of a call is a kObject: the callee, the arguments, and the state that
// was set afterwards. A set, bytes or OrderedDict has its own kind, however it was pickled. Copies share their nodes,
// which never change; no value contains itself. A const PickleValue is thread-safe.
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
  kGlobal,      // a class or function, e.g. torch.float32
  kObject,      // the result of a call, e.g. torch.Size((2, 3))
  kPersistent,  // id of a storage of torch.save
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
  // Makes a text value. Error kFormat for text that is not UTF-8.
  PickleValue(const char* text) : PickleValue(std::string(text)) {}
  PickleValue(std::string text);
  static PickleValue bytes(std::string bytes);
  static PickleValue list(Items items);
  static PickleValue tuple(Items items);
  static PickleValue set(Items items);
  // dict() and ordered_dict() do not compare the keys. The caller ensures that no two keys are equal.
  static PickleValue dict(std::vector<Pair> pairs);
  static PickleValue ordered_dict(std::vector<Pair> pairs);
  // A class or function, e.g. ("torch", "float32").
  static PickleValue global(std::string module, std::string name);
  // The object CLASS_OR_FUNCTION(*args).
  static PickleValue call(const PickleValue& callee, Items args);
  // An instance of a class, created without a call. `state` is a dict or tuple; None means no state.
  static PickleValue instance(const PickleValue& cls, PickleValue state);
  static PickleValue persistent(PickleValue id);

  PickleKind kind() const;
  bool is_none() const { return kind() == PickleKind::kNone; }
  // Whether the value is the class or function with this name, or an object that this class or function makes. Names
  // are such as "torch.float32" or "torch.Size".
  bool is_global(std::string_view qualified_name) const;
  bool is_object(std::string_view qualified_name) const;

  // Return the value as a C++ value. Error kFormat when the value has another kind.
  bool as_bool() const;
  int64_t as_int() const;
  double as_float() const;
  const std::string& as_text() const;
  const std::string& as_bytes() const;
  std::span<const PickleValue> items() const;  // of a list, tuple or set
  size_t dict_size() const;
  const PickleValue& key(size_t index) const;
  const PickleValue& value(size_t index) const;
  // The value under a text key; null without such a key. Takes time linear in the size of the dict.
  const PickleValue* find(std::string_view key) const;
  bool is_ordered_dict() const;
  std::string qualified_name() const;  // of a global or an object: "torch.Size"
  const std::string& global_module() const;
  const std::string& global_name() const;
  const PickleValue& callee() const;          // of an object: a global
  std::span<const PickleValue> args() const;  // of an object
  bool is_instance() const;                   // an object made by instance()
  const PickleValue& state() const;           // of an object or an ordered dict; None without a state
  const PickleValue& persistent_id() const;

  // The address of the node: equal for values that share a node, null for None, bools and numbers.
  const void* identity() const;

  // A short form for messages: "None", "7", "'text'", "a list of 3 values", "a torch.Size".
  std::string describe() const;

 private:
  friend class Unpickler;
  friend bool is_same_pickle(const PickleValue& a, const PickleValue& b);
  explicit PickleValue(std::shared_ptr<detail::PickleNode> node) : value_(std::move(node)) {}
  const detail::PickleNode& node(PickleKind expected_kind, const char* expected) const;
  template <class T>
  T number(const char* expected) const;
  std::variant<std::monostate, bool, int64_t, double, std::shared_ptr<detail::PickleNode>> value_;
};

// Whether both trees have the same kinds, numbers (bitwise), texts, and parts in the same order. Sharing of nodes is
// not compared.
bool is_same_pickle(const PickleValue& a, const PickleValue& b);

}  // namespace tessera
