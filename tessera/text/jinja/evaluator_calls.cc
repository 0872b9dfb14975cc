#include <algorithm>

#include "tessera/text/jinja/builtin.h"
#include "tessera/text/jinja/evaluator.h"
#include "tessera/text/jinja/scoped.h"

namespace tessera::text::jinja {

BoundArguments bind(std::string_view function, const Arguments& arguments, std::span<const std::string_view> parameters,
                    size_t required) {
  BoundArguments bound(parameters.size(), nullptr);
  if (arguments.positional.size() > parameters.size()) {
    fail("{} takes at most {} arguments, {} are given", function, parameters.size(), arguments.positional.size());
  }
  for (size_t i = 0; i < arguments.positional.size(); ++i) bound[i] = &arguments.positional[i];
  for (const auto& [name, value] : arguments.named) {
    const auto found = std::ranges::find(parameters, name);
    if (found == parameters.end()) fail("{} has no argument '{}'", function, name.substr(0, 80));
    const auto at = static_cast<size_t>(found - parameters.begin());
    if (bound[at]) fail("{} is given its argument '{}' twice", function, name);
    bound[at] = &value;
  }
  for (size_t i = 0; i < required; ++i) {
    if (!bound[i]) fail("{} needs its argument '{}'", function, parameters[i]);
  }
  return bound;
}

Value call_builtin(const BuiltinTable::value_type& builtin, Evaluator& evaluator, const Value& input,
                   const Arguments& arguments) {
  const auto& [name, function] = builtin;
  if (function.call_with_arguments) return function.call_with_arguments(evaluator, input, arguments);
  return function.call(evaluator, input, jinja::bind(name, arguments, function.parameters, function.required));
}

Value Evaluator::call(const Value& callee, const Arguments& arguments) {
  budget_.charge(0);
  switch (callee.kind()) {
    case ValueKind::kUndefined:
      fail("{}", callee.hint());
    case ValueKind::kMacro:
      return call_macro(callee.get<Macro>(), arguments);
    case ValueKind::kLoop:
      return call_loop(callee, arguments);
    case ValueKind::kFunction: {
      const auto& function = callee.get<Function>();
      if (function.self.is(ValueKind::kUndefined)) return call_global(*this, function.name, arguments);
      if (!function.self.is(ValueKind::kLoop)) return call_method(*this, function.self, function.name, arguments);
      auto& loop = function.self.get<LoopState>();
      if (function.name == "cycle") {
        if (arguments.positional.empty()) fail("loop.cycle needs items");
        return arguments.positional[static_cast<size_t>(loop.index0) % arguments.positional.size()];
      }
      Value seen = make_list(arguments.positional, ValueKind::kTuple);
      const bool changed = !equal(seen, loop.changed, budget_);
      budget_.check_depth(seen.depth() + 1);
      loop.depth_of_items = std::max(loop.depth_of_items, seen.depth() + 1);
      // `seen`, the arguments of this call of loop.changed(), may contain the loop itself; storing `seen` in
      // LoopState::changed then makes a cycle of shared_ptr. execute_for() breaks the cycle when the loop ends: it
      // clears LoopState::scope and LoopState::changed. After the end of the loop, when `scope` is null,
      // LoopState::changed must not be set again.
      if (loop.scope) loop.changed = std::move(seen);
      return Value::boolean(changed);
    }
    default:
      fail("a {} cannot be called", type_name(callee));
  }
}

// A macro owns the scope in which it is defined, so that it can read this scope's variables when it is called.
Value Evaluator::make_macro(const std::shared_ptr<const MacroDefinition>& definition) {
  auto macro = std::make_shared<Macro>();
  macro->tree = definition.get();
  macro->scope = scope_;
  budget_.charge(sizeof(Macro));
  if (captured_scopes_.empty() || captured_scopes_.back() != scope_) captured_scopes_.push_back(scope_);
  return Value::object(ValueKind::kMacro, std::move(macro));
}

// Sets the parameters of a macro in scope_, which is already the scope of this call. Defaults are evaluated in
// parameter order after the arguments before them are set, so a default may use earlier parameters. As in Jinja2 the
// macro has `caller`, `varargs` and `kwargs` only if its body uses these names.
void Evaluator::bind_parameters(const MacroDefinition& tree, const Arguments& arguments) {
  const size_t count = tree.parameters.size();
  const size_t positional = std::min(count, arguments.positional.size());
  budget_.charge(arguments.named.size() * count * 16);
  std::vector<const Value*> given(count, nullptr);
  for (size_t i = 0; i < positional; ++i) given[i] = &arguments.positional[i];
  auto extra = std::make_shared<Dict>();
  Value caller = Value::undefined("the macro was not called with a caller");
  for (const auto& [name, value] : arguments.named) {
    const auto found = std::ranges::find(tree.parameters, name);
    if (found != tree.parameters.end()) {
      const Value*& slot = given[static_cast<size_t>(found - tree.parameters.begin())];
      if (slot) fail("macro '{}' is given its argument '{}' twice", tree.name, name);
      slot = &value;
    } else if (name == "caller" && tree.uses_caller) {
      caller = value;
    } else if (tree.uses_kwargs && name != "caller") {
      extra->set(Value::text(name), value, budget_);
    } else {
      fail("macro '{}' takes no keyword argument '{}'", tree.name, name.substr(0, 80));
    }
  }
  if (arguments.positional.size() > count && !tree.uses_varargs) {
    fail("macro '{}' takes not more than {} arguments", tree.name, count);
  }
  if (tree.uses_caller) set_variable("caller", caller);
  if (tree.uses_kwargs) set_variable("kwargs", make_dict(std::move(extra)));
  if (tree.uses_varargs) {
    const auto first = arguments.positional.begin() + static_cast<std::ptrdiff_t>(positional);
    set_variable("varargs", make_list({first, arguments.positional.end()}, ValueKind::kTuple));
  }
  const size_t first_default = count - tree.defaults.size();
  for (size_t i = 0; i < count; ++i) {
    if (given[i]) {
      set_variable(tree.parameters[i], *given[i]);
    } else if (i >= first_default) {
      set_variable(tree.parameters[i], evaluate(*tree.defaults[i - first_default]));
    } else {
      set_variable(tree.parameters[i],
                   Value::undefined(fmt::format("parameter '{}' was not provided", tree.parameters[i].substr(0, 80))));
    }
  }
}

Value Evaluator::call_macro(const Macro& macro, const Arguments& arguments) {
  if (macro_depth_ >= budget_.max_depth) fail("macros call each other deeper than {}", budget_.max_depth);
  const ScopedValue deeper(macro_depth_, macro_depth_ + 1);
  const ScopedValue inside(scope_, inner_scope(macro.scope));
  const MacroDefinition& tree = *macro.tree;
  bind_parameters(tree, arguments);
  return make_text(render_to_string(tree.body));
}

// loop(items) inside a loop marked 'recursive': runs the loop statement again over `items` in the scope around the
// loop, and returns its output.
Value Evaluator::call_loop(const Value& value, const Arguments& arguments) {
  auto loop = value.share<LoopState>();
  if (!loop->statement->recursive) fail("only a loop marked 'recursive' can be called");
  if (!loop->scope) fail("a loop that has ended cannot be called");
  const auto bound = bind("loop", arguments, {"iterable"}, 1);
  if (macro_depth_ >= budget_.max_depth) fail("a recursive loop runs deeper than {}", budget_.max_depth);
  std::string text;
  const ScopedValue deeper(macro_depth_, macro_depth_ + 1);
  const ScopedValue output(out_, &text);
  const ScopedValue inside(scope_, loop->scope);
  execute_for(*loop->statement, elements(*bound[0], budget_), loop->depth0 + 1);
  return make_text(std::move(text));
}

Value Evaluator::loop_attribute(const Value& value, const std::string& name) {
  auto& loop = value.get<LoopState>();
  // An item that the loop's condition rejects is not part of loop.length. Therefore loop.length is known only after all
  // items have been read. After the loop has ended, loop.scope is null and no items are read.
  const auto length = [&] {
    Value next;
    while (loop.scope && read_next_item(loop, next)) loop.pending.push_back(std::move(next));
    return loop.index0 + 1 + static_cast<int64_t>(loop.pending.size());
  };
  if (name == "index") return Value::integer(loop.index0 + 1);
  if (name == "index0") return Value::integer(loop.index0);
  if (name == "first") return Value::boolean(loop.index0 == 0);
  if (name == "last") return Value::boolean(!has_next_item(loop));
  if (name == "length") return Value::integer(length());
  if (name == "revindex") return Value::integer(length() - loop.index0);
  if (name == "revindex0") return Value::integer(length() - loop.index0 - 1);
  if (name == "depth") return Value::integer(loop.depth0 + 1);
  if (name == "depth0") return Value::integer(loop.depth0);
  if (name == "previtem") return loop.index0 > 0 ? loop.previous : Value::undefined("there is no previous item");
  if (name == "nextitem") return has_next_item(loop) ? loop.pending.front() : Value::undefined("there is no next item");
  if (name == "cycle" || name == "changed") {
    return Value::object(ValueKind::kFunction, std::make_shared<Function>(Function{name, value}));
  }
  return Value();
}

}  // namespace tessera::text::jinja
