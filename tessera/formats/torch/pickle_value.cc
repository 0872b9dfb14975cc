#include "tessera/formats/torch/pickle_value.h"

#include <algorithm>
#include <bit>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/base/text/utf8.h"
#include "tessera/formats/torch/detail/pickle_node.h"

namespace tessera {

using detail::children_of;
using detail::PickleContainerNode;
using detail::PickleTextNode;

namespace {

const PickleValue kNonePickle;

// Layout of the parts of each kind: detail/pickle_node.h.
std::shared_ptr<PickleContainerNode> make_parts(PickleKind kind, std::vector<PickleValue> parts) {
  return std::make_shared<PickleContainerNode>(kind, std::move(parts));
}

std::shared_ptr<PickleContainerNode> make_dict(std::vector<PickleValue::Pair> pairs) {
  std::vector<PickleValue> parts;
  parts.reserve(2 * pairs.size());
  for (auto& [key, value] : pairs) {
    parts.push_back(std::move(key));
    parts.push_back(std::move(value));
  }
  return make_parts(PickleKind::kDict, std::move(parts));
}

bool is_qualified(const std::string& module, const std::string& name, std::string_view qualified_name) {
  return qualified_name.size() == module.size() + 1 + name.size() &&
         qualified_name.substr(0, module.size()) == module && qualified_name[module.size()] == '.' &&
         qualified_name.substr(module.size() + 1) == name;
}

}  // namespace

PickleValue::PickleValue(std::string text) {
  TESSERA_CHECK(is_valid_utf8(text), ErrorKind::kFormat, "[pickle] {} is no UTF-8", quote(text));
  value_ = std::make_shared<PickleTextNode>(PickleKind::kText, std::move(text));
}

PickleValue PickleValue::bytes(std::string bytes) {
  return PickleValue(std::make_shared<PickleTextNode>(PickleKind::kBytes, std::move(bytes)));
}
PickleValue PickleValue::list(Items items) { return PickleValue(make_parts(PickleKind::kList, std::move(items))); }
PickleValue PickleValue::tuple(Items items) { return PickleValue(make_parts(PickleKind::kTuple, std::move(items))); }
PickleValue PickleValue::set(Items items) { return PickleValue(make_parts(PickleKind::kSet, std::move(items))); }
PickleValue PickleValue::dict(std::vector<Pair> pairs) { return PickleValue(make_dict(std::move(pairs))); }

PickleValue PickleValue::ordered_dict(std::vector<Pair> pairs) {
  auto node = make_dict(std::move(pairs));
  node->ordered = true;
  return PickleValue(std::move(node));
}

PickleValue PickleValue::global(std::string module, std::string name) {
  return PickleValue(make_parts(PickleKind::kGlobal, {std::move(module), std::move(name)}));
}

PickleValue PickleValue::call(const PickleValue& callee, Items args) {
  callee.node(PickleKind::kGlobal, "a class or function");
  args.insert(args.begin(), {callee, PickleValue()});
  return PickleValue(make_parts(PickleKind::kObject, std::move(args)));
}

PickleValue PickleValue::instance(const PickleValue& cls, PickleValue state) {
  cls.node(PickleKind::kGlobal, "a class");
  auto node = make_parts(PickleKind::kObject, {cls, std::move(state)});
  node->instance = true;
  return PickleValue(std::move(node));
}

PickleValue PickleValue::persistent(PickleValue id) {
  return PickleValue(make_parts(PickleKind::kPersistent, {std::move(id)}));
}

// Alternative 4 of the variant value_ is the pointer to the node. None, bools and numbers are the alternatives 0 to 3
// and have no node.
PickleKind PickleValue::kind() const {
  constexpr PickleKind kWithoutNode[] = {PickleKind::kNone, PickleKind::kBool, PickleKind::kInt, PickleKind::kFloat};
  const auto* node = std::get_if<4>(&value_);
  return node ? (*node)->kind : kWithoutNode[value_.index()];
}

const detail::PickleNode& PickleValue::node(PickleKind expected_kind, const char* expected) const {
  TESSERA_CHECK(kind() == expected_kind, ErrorKind::kFormat, "[pickle] found {}, wanted {}", describe(), expected);
  return *std::get<4>(value_);
}

bool PickleValue::is_global(std::string_view qualified_name) const {
  if (kind() != PickleKind::kGlobal) return false;
  const auto& parts = children_of(*std::get<4>(value_));
  return is_qualified(parts[0].as_text(), parts[1].as_text(), qualified_name);
}

bool PickleValue::is_object(std::string_view qualified_name) const {
  return kind() == PickleKind::kObject && callee().is_global(qualified_name);
}

template <class T>
T PickleValue::number(const char* expected) const {
  const auto* value = std::get_if<T>(&value_);
  TESSERA_CHECK(value, ErrorKind::kFormat, "[pickle] found {}, wanted {}", describe(), expected);
  return *value;
}

bool PickleValue::as_bool() const { return number<bool>("True or False"); }
int64_t PickleValue::as_int() const { return number<int64_t>("an integer"); }
double PickleValue::as_float() const { return number<double>("a float"); }

const std::string& PickleValue::as_text() const { return detail::text_of(node(PickleKind::kText, "text")); }
const std::string& PickleValue::as_bytes() const { return detail::text_of(node(PickleKind::kBytes, "bytes")); }

std::span<const PickleValue> PickleValue::items() const {
  const auto found = kind();
  TESSERA_CHECK(found == PickleKind::kList || found == PickleKind::kTuple || found == PickleKind::kSet,
                ErrorKind::kFormat, "[pickle] found {}, wanted a list, tuple or set", describe());
  return children_of(*std::get<4>(value_));
}

size_t PickleValue::dict_size() const { return children_of(node(PickleKind::kDict, "a dict")).size() / 2; }
const PickleValue& PickleValue::key(size_t index) const {
  return children_of(node(PickleKind::kDict, "a dict")).at(2 * index);
}
const PickleValue& PickleValue::value(size_t index) const {
  return children_of(node(PickleKind::kDict, "a dict")).at(2 * index + 1);
}

const PickleValue* PickleValue::find(std::string_view wanted_key) const {
  const auto& parts = children_of(node(PickleKind::kDict, "a dict"));
  for (size_t i = 0; i + 1 < parts.size(); i += 2) {
    if (parts[i].kind() == PickleKind::kText && parts[i].as_text() == wanted_key) return &parts[i + 1];
  }
  return nullptr;
}

bool PickleValue::is_ordered_dict() const { return kind() == PickleKind::kDict && std::get<4>(value_)->ordered; }

std::string PickleValue::qualified_name() const {
  if (kind() == PickleKind::kObject) return callee().qualified_name();
  return global_module() + "." + global_name();
}

const std::string& PickleValue::global_module() const {
  return children_of(node(PickleKind::kGlobal, "a class or function"))[0].as_text();
}
const std::string& PickleValue::global_name() const {
  return children_of(node(PickleKind::kGlobal, "a class or function"))[1].as_text();
}

const PickleValue& PickleValue::callee() const { return children_of(node(PickleKind::kObject, "an object"))[0]; }
std::span<const PickleValue> PickleValue::args() const {
  return std::span(children_of(node(PickleKind::kObject, "an object"))).subspan(2);
}
bool PickleValue::is_instance() const { return kind() == PickleKind::kObject && std::get<4>(value_)->instance; }

// A dict has two parts for each key, so an odd last part is the state of an OrderedDict.
const PickleValue& PickleValue::state() const {
  if (is_ordered_dict()) {
    const auto& parts = children_of(*std::get<4>(value_));
    return parts.size() % 2 == 1 ? parts.back() : kNonePickle;
  }
  return children_of(node(PickleKind::kObject, "an object"))[1];
}

const PickleValue& PickleValue::persistent_id() const {
  return children_of(node(PickleKind::kPersistent, "a persistent id"))[0];
}

const void* PickleValue::identity() const {
  const auto* node = std::get_if<4>(&value_);
  return node ? node->get() : nullptr;
}

std::string PickleValue::describe() const {
  switch (kind()) {
    case PickleKind::kNone:
      return "None";
    case PickleKind::kBool:
      return as_bool() ? "True" : "False";
    case PickleKind::kInt:
      return std::to_string(as_int());
    case PickleKind::kFloat:
      return fmt::format("{}", as_float());
    case PickleKind::kText:
      return quote(as_text());
    case PickleKind::kBytes:
      return fmt::format("{} bytes", as_bytes().size());
    case PickleKind::kList:
      return fmt::format("a list of {} values", items().size());
    case PickleKind::kTuple:
      return fmt::format("a tuple of {} values", items().size());
    case PickleKind::kSet:
      return fmt::format("a set of {} values", items().size());
    case PickleKind::kDict:
      return fmt::format("a dict of {} keys", dict_size());
    case PickleKind::kGlobal:
      return escape(qualified_name());
    case PickleKind::kObject:
      return "a " + escape(qualified_name());
    case PickleKind::kPersistent:
      return "a persistent id";
  }
  return "";
}

// Floats are compared bit by bit, so NaN equals itself and 0.0 differs from -0.0.
bool is_same_pickle(const PickleValue& a, const PickleValue& b) {
  if (a.kind() != b.kind()) return false;
  if (a.kind() == PickleKind::kFloat) {
    return std::bit_cast<int64_t>(a.as_float()) == std::bit_cast<int64_t>(b.as_float());
  }
  if (a.value_ == b.value_) return true;
  if (!a.identity()) return false;
  const auto &left = *std::get<4>(a.value_), &right = *std::get<4>(b.value_);
  if (a.kind() == PickleKind::kText || a.kind() == PickleKind::kBytes) {
    return detail::text_of(left) == detail::text_of(right);
  }
  return left.ordered == right.ordered && left.instance == right.instance &&
         std::ranges::equal(children_of(left), children_of(right), is_same_pickle);
}

}  // namespace tessera
