#include <algorithm>

#include "tessera/text/jinja/evaluator.h"
#include "tessera/text/jinja/scoped.h"

namespace tessera::text::jinja {

void Evaluator::emit(std::string_view text) {
  budget_.check_size(out_->size() + text.size());
  budget_.charge(text.size());
  out_->append(text);
}

std::string Evaluator::render_to_string(const Body& body) {
  std::string text;
  const ScopedValue output(out_, &text);
  execute(body);
  return text;
}

Evaluator::Flow Evaluator::execute(const Body& body) {
  for (const auto& statement : body) {
    const Flow flow = execute(statement);
    if (flow != Flow::kNormal) return flow;
  }
  return Flow::kNormal;
}

Evaluator::Flow Evaluator::execute(const Statement& statement) {
  const ScopedValue deeper(running_depth_, next_depth());
  line_ = statement.line;
  budget_.charge(0);
  switch (statement.kind) {
    case StatementKind::kText:
      emit(statement.text);
      break;
    case StatementKind::kPrint:
      emit(text_of(evaluate(*statement.value)));
      break;
    case StatementKind::kIf:
      return execute_if(statement);
    case StatementKind::kFor:
      return execute_for(statement, elements(evaluate(*statement.value), budget_), 0);
    case StatementKind::kSet:
      assign(statement.target, evaluate(*statement.value));
      break;
    case StatementKind::kSetBlock:
      assign(statement.target, render_filtered_block(statement));
      break;
    case StatementKind::kMacro:
      set_variable(statement.macro->name, make_macro(statement.macro));
      break;
    case StatementKind::kCallBlock:
      execute_call_block(statement);
      break;
    case StatementKind::kFilterBlock:
      emit(text_of(render_filtered_block(statement)));
      break;
    case StatementKind::kWith:
      execute_with(statement);
      break;
    case StatementKind::kGeneration:
      execute_generation(statement);
      break;
    case StatementKind::kBreak:
      return Flow::kBreak;
    case StatementKind::kContinue:
      return Flow::kContinue;
  }
  return Flow::kNormal;
}

Evaluator::Flow Evaluator::execute_if(const Statement& statement) {
  for (const auto& branch : statement.branches) {
    if (truthy(evaluate(*branch.condition))) return execute(branch.body);
  }
  return execute(statement.otherwise);
}

// Reads the next item that passes the loop's condition. Returns false at the end of the source. The condition runs in a
// new scope that has the target, but not the variable `loop`.
bool Evaluator::read_next_item(LoopState& loop, Value& value) {
  while (loop.next_source < loop.source.size()) {
    value = loop.source[loop.next_source++];
    if (!loop.statement->condition) return true;
    const ScopedValue inside(scope_, inner_scope(loop.scope));
    assign(loop.statement->target, value);
    if (truthy(evaluate(*loop.statement->condition))) return true;
  }
  return false;
}

bool Evaluator::has_next_item(LoopState& loop) {
  if (!loop.pending.empty()) return true;
  Value value;
  if (!loop.scope || !read_next_item(loop, value)) return false;
  loop.pending.push_back(std::move(value));
  return true;
}

// Each iteration has a new scope with `loop` and the target. An item is read when it is needed: for the next iteration,
// or by loop.last and loop.nextitem. A template may keep `loop` after the loop has ended, so the local struct End
// clears the members that could form a cycle of shared_ptr. A break or continue in the body is handled here and not
// returned to the caller.
Evaluator::Flow Evaluator::execute_for(const Statement& statement, std::vector<Value> items, int64_t depth0) {
  const auto outside = scope_;
  const ScopedValue restored(scope_, scope_);  // restores scope_, which each iteration replaces
  auto loop = std::make_shared<LoopState>();
  loop->statement = &statement;
  loop->scope = outside;
  loop->source = std::move(items);
  loop->depth0 = depth0;
  for (const auto& item : loop->source) loop->depth_of_items = std::max(loop->depth_of_items, item.depth() + 1);
  budget_.check_depth(loop->depth_of_items + 1);
  struct End {
    LoopState& loop;
    ~End() {
      loop.scope = nullptr;
      loop.changed = Value();
    }
  } end{*loop};
  const Value loop_value = Value::object(ValueKind::kLoop, loop);
  while (has_next_item(*loop)) {
    budget_.charge(0);
    loop->previous = std::move(loop->current);
    loop->current = std::move(loop->pending.front());
    loop->pending.pop_front();
    ++loop->index0;
    scope_ = inner_scope(outside);
    scope_->variables.emplace_back("loop", loop_value);
    assign(statement.target, loop->current);
    if (execute(statement.body) == Flow::kBreak) return Flow::kNormal;
  }
  if (loop->index0 >= 0) return Flow::kNormal;
  scope_ = inner_scope(outside);
  return execute(statement.otherwise);
}

Value Evaluator::render_filtered_block(const Statement& statement) {
  const ScopedValue inside(scope_, inner_scope(scope_));
  const Value text = make_text(render_to_string(statement.body));
  return statement.value ? evaluate_filter(*statement.value, &text) : text;
}

// {% call f(x) %} passes its body to f as the macro `caller`.
void Evaluator::execute_call_block(const Statement& statement) {
  const Value callee = evaluate(*statement.value->operands[0]);
  Arguments arguments = evaluate_arguments(*statement.value);
  arguments.named.emplace_back("caller", make_macro(statement.macro));
  line_ = statement.line;
  emit(text_of(call(callee, arguments)));
}

void Evaluator::execute_with(const Statement& statement) {
  std::vector<Value> values;  // evaluated before the inner scope exists, so none sees another one's name
  for (const auto& assignment : statement.assignments) values.push_back(evaluate(*assignment.second));
  const ScopedValue inside(scope_, inner_scope(scope_));
  for (size_t i = 0; i < values.size(); ++i) assign(statement.assignments[i].first, std::move(values[i]));
  execute(statement.body);
}

// Runs a {% generation %} block and adds its span. As in transformers, the span begins at the current end of root_out_,
// the template's output, even inside a macro, whose output is first collected in another string.
void Evaluator::execute_generation(const Statement& statement) {
  const ScopedValue inside(scope_, inner_scope(scope_));
  const std::string text = render_to_string(statement.body);
  generation_spans_.emplace_back(root_out_.size(), root_out_.size() + text.size());
  emit(text);
}

// Assigns to a name in the current scope, to an attribute of a namespace, or by unpacking to several targets. The
// nesting depth of a value is checked before the value is stored in a namespace. A namespace can be stored in itself,
// and then its depth grows with each assignment.
void Evaluator::assign(const AssignmentTarget& target, Value value) {
  if (!target.attribute.empty()) {
    Value* space = scope_->find(target.name, budget_);
    if (!space || !space->is(ValueKind::kNamespace)) {
      fail("cannot assign an attribute of '{}': it is no namespace", target.name);
    }
    if (target.attribute.starts_with('_')) fail("a namespace cannot hold '{}'", target.attribute.substr(0, 80));
    auto& attributes = *space->get<Namespace>().attributes;
    const int depth = value.depth();
    budget_.check_depth(depth + 2);
    const Value key = Value::text(target.attribute);
    attributes.set(key, std::move(value), budget_);
    return;
  }
  if (target.parts.empty()) return set_variable(target.name, std::move(value));
  std::vector<Value> parts = elements(value, budget_);
  if (parts.size() != target.parts.size()) {
    fail("cannot unpack {} values into {} names", parts.size(), target.parts.size());
  }
  for (size_t i = 0; i < parts.size(); ++i) assign(target.parts[i], std::move(parts[i]));
}

}  // namespace tessera::text::jinja
