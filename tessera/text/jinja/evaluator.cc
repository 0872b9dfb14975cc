#include "tessera/text/jinja/evaluator.h"

#include <algorithm>

#include "tessera/text/jinja/scoped.h"

namespace tessera::text::jinja {

// Names are compared one by one. Each comparison charges the budget, which limits slow lookups among many variables.
Value* Scope::find(std::string_view name, Budget& budget) {
  size_t compared = 0;
  Value* found = nullptr;
  for (Scope* scope = this; scope && !found; scope = scope->parent.get()) {
    ++compared;
    for (auto& [key, value] : scope->variables) {
      ++compared;
      if (key != name) continue;
      found = &value;
      break;
    }
  }
  budget.charge(compared * 4);
  return found;
}

// Limits the C++ stack. A macro call nests the whole tree of the macro inside the tree of the caller, so the parser's
// limit on the depth of one tree is not enough.
int Evaluator::next_depth() const {
  constexpr int kLevelsEach = 8;  // levels of tree recursion per level of nesting that the template may have
  const int limit = budget_.max_depth * kLevelsEach;
  if (running_depth_ >= limit) fail("macros, blocks and expressions run deeper than {} levels", limit);
  return running_depth_ + 1;
}

// Breaks cycles of shared_ptr: a macro owns the scope in which it is defined, and this scope has the macro as a
// variable. A namespace may have itself as an attribute.
Evaluator::~Evaluator() {
  for (auto& scope : captured_scopes_) scope->variables.clear();
  for (auto& space : namespaces_) space->attributes = std::make_shared<Dict>();
}

void Evaluator::define(std::string name, Value value) {
  names_.push_back(std::move(name));
  set_variable(names_.back(), std::move(value));
}

std::string Evaluator::run(const Body& body) {
  scope_ = inner_scope(scope_);
  out_ = &root_out_;
  execute(body);
  return std::move(root_out_);
}

// The make_ functions create values and charge the budget for them, so a template cannot create large values for free.
Value Evaluator::make_text(std::string text, bool markup) {
  budget_.check_size(text.size());
  budget_.charge(text.size());
  return Value::text(std::move(text), markup);
}

Value Evaluator::make_list(std::vector<Value> items, ValueKind kind) {
  budget_.check_size(items.size());
  budget_.charge(items.size() * sizeof(Value));
  Value made = Value::list(std::move(items), kind);
  budget_.check_depth(made.depth());
  return made;
}

Value Evaluator::make_dict(std::shared_ptr<const Dict> dict) {
  budget_.charge(dict->entries.size() * 2 * sizeof(Value));
  budget_.check_depth(dict->depth);
  return Value::dict(std::move(dict));
}

Value Evaluator::make_namespace(std::shared_ptr<Dict> attributes) {
  auto space = std::make_shared<Namespace>();
  space->attributes = std::move(attributes);
  budget_.check_depth(space->attributes->depth + 1);
  namespaces_.push_back(space);
  return Value::object(ValueKind::kNamespace, std::move(space));
}

std::shared_ptr<Scope> Evaluator::inner_scope(std::shared_ptr<Scope> parent) {
  auto scope = std::make_shared<Scope>();
  scope->parent = std::move(parent);
  return scope;
}

void Evaluator::set_variable(std::string_view name, Value value) {
  budget_.charge(scope_->variables.size() * 4);
  for (auto& [key, old] : scope_->variables) {
    if (key == name) {
      old = std::move(value);
      return;
    }
  }
  scope_->variables.emplace_back(name, std::move(value));
}

// Every node costs at least one step and one level of depth; charge(0) charges the step. line_ is the line of the last
// node that was entered, which is the line of an error.
Value Evaluator::evaluate(const Expression& node) {
  const ScopedValue deeper(running_depth_, next_depth());
  line_ = node.line;
  budget_.charge(0);
  switch (node.kind) {
    case ExpressionKind::kLiteral:
      return node.literal;
    case ExpressionKind::kName:
      return evaluate_name(node);
    case ExpressionKind::kList:
    case ExpressionKind::kTuple:
    case ExpressionKind::kDict:
      return evaluate_collection(node);
    case ExpressionKind::kConditional:
      if (truthy(evaluate(*node.operands[0]))) return evaluate(*node.operands[1]);
      if (node.operands[2]) return evaluate(*node.operands[2]);
      return Value::undefined("the inline 'if' was false and has no 'else'");
    case ExpressionKind::kOr:
    case ExpressionKind::kAnd: {
      Value value;
      for (const auto& operand : node.operands) {
        value = evaluate(*operand);
        if (truthy(value) == (node.kind == ExpressionKind::kOr)) break;
      }
      return value;
    }
    case ExpressionKind::kNot:
      return Value::boolean(!truthy(evaluate(*node.operands[0])));
    case ExpressionKind::kCompare:
      return evaluate_comparison(node);
    case ExpressionKind::kConcat:
      return evaluate_concatenation(node);
    case ExpressionKind::kArithmetic:
    case ExpressionKind::kNegative:
    case ExpressionKind::kPositive:
      return evaluate_operator(node);
    case ExpressionKind::kAttribute:
      return attribute(evaluate(*node.operands[0]), node.text);
    case ExpressionKind::kItem:
      return evaluate_item(node);
    case ExpressionKind::kCall:
      return evaluate_call(node);
    case ExpressionKind::kFilter:
      return evaluate_filter(node, nullptr);
    case ExpressionKind::kTest:
      return evaluate_test(node);
    case ExpressionKind::kSlice:
      break;
  }
  fail("a slice is outside of a subscript");
}

Value Evaluator::evaluate_name(const Expression& node) {
  if (const Value* found = scope_->find(node.text, budget_)) return *found;
  if (is_global(node.text)) {
    return Value::object(ValueKind::kFunction, std::make_shared<Function>(Function{node.text, Value()}));
  }
  return Value::undefined(fmt::format("'{}' is undefined", node.text.substr(0, 80)));
}

Value Evaluator::evaluate_collection(const Expression& node) {
  if (node.kind == ExpressionKind::kDict) {
    auto dict = std::make_shared<Dict>();
    for (size_t i = 0; i < node.operands.size(); i += 2) {
      const Value key = evaluate(*node.operands[i]);
      dict->set(key, evaluate(*node.operands[i + 1]), budget_);
    }
    return make_dict(std::move(dict));
  }
  std::vector<Value> items;
  for (const auto& operand : node.operands) items.push_back(evaluate(*operand));
  return make_list(std::move(items), node.kind == ExpressionKind::kTuple ? ValueKind::kTuple : ValueKind::kList);
}

// Evaluates a sign, or a chain of operators of one precedence, such as a + b - c, from left to right. -x is computed as
// 0 - x, and +x as 0 + x, so the signs accept the same types and overflow in the same way as the operators. For a
// float, -x is computed directly, to keep -0.0.
Value Evaluator::evaluate_operator(const Expression& node) {
  Value value = evaluate(*node.operands[0]);
  if (node.kind == ExpressionKind::kNegative && value.is(ValueKind::kFloat)) return Value::real(-value.as_double());
  if (node.kind == ExpressionKind::kNegative) return binary(*this, Operator::kSubtract, Value::integer(0), value);
  if (node.kind == ExpressionKind::kPositive) return binary(*this, Operator::kAdd, Value::integer(0), value);
  for (size_t i = 0; i < node.operators.size(); ++i) {
    const Value right = evaluate(*node.operands[i + 1]);
    line_ = node.line;
    value = binary(*this, node.operators[i], value, right);
  }
  return value;
}

// a < b < c is a < b and b < c with b evaluated once, as in Python. The operands after a false comparison are not
// evaluated.
Value Evaluator::evaluate_comparison(const Expression& node) {
  Value left = evaluate(*node.operands[0]);
  for (size_t i = 0; i < node.operators.size(); ++i) {
    Value right = evaluate(*node.operands[i + 1]);
    line_ = node.line;
    if (!compare(node.operators[i], left, right, budget_)) return Value::boolean(false);
    left = std::move(right);
  }
  return Value::boolean(true);
}

Value Evaluator::evaluate_concatenation(const Expression& node) {
  std::string joined;
  for (const auto& operand : node.operands) {
    joined += text_of(evaluate(*operand));
    budget_.check_size(joined.size());
  }
  return make_text(std::move(joined));
}

Value Evaluator::evaluate_item(const Expression& node) {
  const Value of = evaluate(*node.operands[0]);
  const Expression& key = *node.operands[1];
  if (key.kind != ExpressionKind::kSlice) return item(of, evaluate(key));
  Value bounds[3];
  for (size_t i = 0; i < 3; ++i) bounds[i] = key.operands[i] ? evaluate(*key.operands[i]) : Value::none();
  line_ = node.line;
  return slice(*this, of, bounds[0], bounds[1], bounds[2]);
}

Arguments Evaluator::evaluate_arguments(const Expression& node) {
  const CallArguments& given = *node.arguments;
  Arguments made;
  for (const auto& argument : given.positional) made.positional.push_back(evaluate(*argument));
  for (const auto& [name, argument] : given.named) made.named.emplace_back(name, evaluate(*argument));
  if (given.unpacked_list) {
    for (auto& element : elements(evaluate(*given.unpacked_list), budget_)) {
      made.positional.push_back(std::move(element));
    }
  }
  if (given.unpacked_named) {
    const Value named = evaluate(*given.unpacked_named);
    if (!named.is(ValueKind::kDict)) fail("the argument after ** is {}, not a mapping", type_name(named));
    for (const auto& [key, value] : named.get<Dict>().entries) {
      if (!key.is(ValueKind::kString)) fail("keywords must be strings");
      made.named.emplace_back(key.as_text(), value);
    }
    budget_.charge(made.named.size() * sizeof(Value));
  }
  line_ = node.line;
  return made;
}

Value Evaluator::evaluate_call(const Expression& node) {
  const Value callee = evaluate(*node.operands[0]);
  return call(callee, evaluate_arguments(node));
}

// In a {% filter %} or {% set %} block the innermost filter of the chain has no operand; its input is the block's text,
// `block_input`.
Value Evaluator::evaluate_filter(const Expression& node, const Value* block_input) {
  const Expression* inner = node.operands[0].get();
  Value input;
  if (!inner) {
    input = *block_input;
  } else if (block_input && inner->kind == ExpressionKind::kFilter) {
    input = evaluate_filter(*inner, block_input);
  } else {
    input = evaluate(*inner);
  }
  return apply_filter(*this, node.text, input, evaluate_arguments(node));
}

Value Evaluator::evaluate_test(const Expression& node) {
  const Value input = evaluate(*node.operands[0]);
  return Value::boolean(apply_test(*this, node.text, input, evaluate_arguments(node)));
}

// The attribute that the object itself defines: a namespace entry, a member of `loop`, a macro's name or a method.
// nullopt when there is none; the caller then searches the entries of a dict. For a name that the sandbox forbids, the
// result is an undefined value, so a dict entry with this name is not found either.
std::optional<Value> Evaluator::own_attribute(const Value& of, const std::string& name) {
  if (of.is(ValueKind::kNamespace)) {
    if (const Value* value = of.get<Namespace>().attributes->find(Value::text(name), budget_)) return *value;
  } else if (of.is(ValueKind::kLoop)) {
    Value value = loop_attribute(of, name);
    if (!value.is(ValueKind::kUndefined) || name == "previtem" || name == "nextitem") return value;
  } else if (of.is(ValueKind::kMacro) && name == "name") {
    return make_text(of.get<Macro>().tree->name);
  } else if (has_method(of, name)) {
    return Value::object(ValueKind::kFunction, std::make_shared<Function>(Function{name, of}));
  } else if (is_forbidden_method(of, name) || name.starts_with("__")) {
    return Value::undefined(fmt::format("templates may not use '{}' of a {}", name.substr(0, 80), type_name(of)));
  }
  return std::nullopt;
}

// a.b: attributes come before the entries of a dict, as in Jinja2. item() for a['b'] has the opposite order.
Value Evaluator::attribute(const Value& of, const std::string& name) {
  if (of.is(ValueKind::kUndefined)) fail("{}", of.hint());
  if (auto own = own_attribute(of, name)) return std::move(*own);
  if (of.is(ValueKind::kDict)) {
    if (const Value* value = of.get<Dict>().find(Value::text(name), budget_)) return *value;
  }
  return Value::undefined(fmt::format("a {} has no attribute '{}'", type_name(of), name.substr(0, 80)));
}

Value Evaluator::item(const Value& of, const Value& key) {
  if (of.is(ValueKind::kUndefined)) fail("{}", of.hint());
  if (of.is(ValueKind::kDict)) {
    const bool hashable = !key.is(ValueKind::kList) && !key.is(ValueKind::kDict);
    if (const Value* value = hashable ? of.get<Dict>().find(key, budget_) : nullptr) return *value;
  } else if (key.is_integral() && (of.is(ValueKind::kString) || (of.is_sized_sequence() && !of.is(ValueKind::kView)))) {
    const int64_t length = length_of(of, budget_);
    const int64_t at = key.as_int() < 0 ? key.as_int() + length : key.as_int();
    if (at >= 0 && at < length) {
      if (!of.is(ValueKind::kString)) return of.items()[static_cast<size_t>(at)];
      return slice(*this, of, Value::integer(at), Value::integer(at + 1), Value::none());
    }
  }
  if (key.is(ValueKind::kString)) {
    if (auto own = own_attribute(of, key.as_text())) return std::move(*own);
    return Value::undefined(fmt::format("a {} has no item '{}'", type_name(of), key.as_text().substr(0, 80)));
  }
  return Value::undefined(fmt::format("a {} has no item of that {} index", type_name(of), type_name(key)));
}

}  // namespace tessera::text::jinja
