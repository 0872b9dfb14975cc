// The tests of Jinja2: the names after `is`.
#include <unordered_map>

#include "tessera/text/jinja/evaluator.h"
#include "tessera/text/jinja/unicode.h"

namespace tessera::text::jinja {
namespace {

using Test = bool (*)(Evaluator&, const Value& input, const Value* argument);

struct TestEntry {
  Test test;
  bool takes_argument = false;
};

bool is_sequence(const Value& value) {
  return value.is(ValueKind::kUndefined) || value.is(ValueKind::kString) || value.is(ValueKind::kDict) ||
         (value.is_sized_sequence() && !value.is(ValueKind::kView));
}

bool is_iterable(const Value& value) { return is_sequence(value) || value.is_sequence() || value.is(ValueKind::kLoop); }

bool is_callable(const Value& value) {
  return value.is(ValueKind::kMacro) || value.is(ValueKind::kFunction) || value.is(ValueKind::kLoop) ||
         value.is(ValueKind::kUndefined);
}

// Python's `is`: small values by value, objects by identity. Two floats are never the same object.
bool same(const Value& left, const Value& right) {
  if (left.kind() != right.kind()) return false;
  switch (left.kind()) {
    case ValueKind::kNone:
      return true;
    case ValueKind::kBool:
    case ValueKind::kInt:
      return left.as_int() == right.as_int();
    case ValueKind::kFloat:
      return false;
    default:
      return left.identity() == right.identity();
  }
}

template <bool (*Wanted)(int32_t), bool (*Other)(int32_t)>
bool cased(Evaluator& evaluator, const Value& input, const Value*) {
  return is_cased<Wanted, Other>(evaluator.text_of(input));
}

bool remainder_is(Evaluator& evaluator, const Value& input, const Value& by, int64_t expected) {
  const Value rest = binary(evaluator, Operator::kModulo, input, by);
  return equal(rest, Value::integer(expected), evaluator.budget());
}

template <Operator kOperator>
bool compares(Evaluator& evaluator, const Value& input, const Value* other) {
  return compare(kOperator, input, *other, evaluator.budget());
}

const std::unordered_map<std::string_view, TestEntry>& tests() {
  static const std::unordered_map<std::string_view, TestEntry> kTable = {
      {"defined", {[](Evaluator&, const Value& v, const Value*) { return !v.is(ValueKind::kUndefined); }}},
      {"undefined", {[](Evaluator&, const Value& v, const Value*) { return v.is(ValueKind::kUndefined); }}},
      {"none", {[](Evaluator&, const Value& v, const Value*) { return v.is(ValueKind::kNone); }}},
      {"boolean", {[](Evaluator&, const Value& v, const Value*) { return v.is(ValueKind::kBool); }}},
      {"true", {[](Evaluator&, const Value& v, const Value*) { return v.is(ValueKind::kBool) && v.as_int(); }}},
      {"false", {[](Evaluator&, const Value& v, const Value*) { return v.is(ValueKind::kBool) && !v.as_int(); }}},
      {"integer",
       {[](Evaluator&, const Value& v, const Value*) { return v.is(ValueKind::kInt) || v.is(ValueKind::kBigInt); }}},
      {"float", {[](Evaluator&, const Value& v, const Value*) { return v.is(ValueKind::kFloat); }}},
      {"number", {[](Evaluator&, const Value& v, const Value*) { return v.is_number(); }}},
      {"string", {[](Evaluator&, const Value& v, const Value*) { return v.is(ValueKind::kString); }}},
      {"mapping", {[](Evaluator&, const Value& v, const Value*) { return v.is(ValueKind::kDict); }}},
      {"sequence", {[](Evaluator&, const Value& v, const Value*) { return is_sequence(v); }}},
      {"iterable", {[](Evaluator&, const Value& v, const Value*) { return is_iterable(v); }}},
      {"callable", {[](Evaluator&, const Value& v, const Value*) { return is_callable(v); }}},
      {"escaped", {[](Evaluator&, const Value& v, const Value*) { return v.is_markup(); }}},
      {"lower", {cased<is_lower, is_upper>}},
      {"upper", {cased<is_upper, is_lower>}},
      {"odd", {[](Evaluator& e, const Value& v, const Value*) { return remainder_is(e, v, Value::integer(2), 1); }}},
      {"even", {[](Evaluator& e, const Value& v, const Value*) { return remainder_is(e, v, Value::integer(2), 0); }}},
      {"divisibleby", {[](Evaluator& e, const Value& v, const Value* a) { return remainder_is(e, v, *a, 0); }, true}},
      {"filter",
       {[](Evaluator&, const Value& v, const Value*) { return v.is(ValueKind::kString) && has_filter(v.as_text()); }}},
      {"test",
       {[](Evaluator&, const Value& v, const Value*) { return v.is(ValueKind::kString) && has_test(v.as_text()); }}},
      {"sameas", {[](Evaluator&, const Value& v, const Value* a) { return same(v, *a); }, true}},
      {"in", {compares<Operator::kIn>, true}},
      {"==", {compares<Operator::kEqual>, true}},
      {"eq", {compares<Operator::kEqual>, true}},
      {"equalto", {compares<Operator::kEqual>, true}},
      {"!=", {compares<Operator::kNotEqual>, true}},
      {"ne", {compares<Operator::kNotEqual>, true}},
      {"<", {compares<Operator::kLess>, true}},
      {"lt", {compares<Operator::kLess>, true}},
      {"lessthan", {compares<Operator::kLess>, true}},
      {"<=", {compares<Operator::kLessEqual>, true}},
      {"le", {compares<Operator::kLessEqual>, true}},
      {">", {compares<Operator::kGreater>, true}},
      {"gt", {compares<Operator::kGreater>, true}},
      {"greaterthan", {compares<Operator::kGreater>, true}},
      {">=", {compares<Operator::kGreaterEqual>, true}},
      {"ge", {compares<Operator::kGreaterEqual>, true}},
  };
  return kTable;
}

}  // namespace

bool has_test(std::string_view name) { return tests().contains(name); }

std::string unknown_test_message(std::string_view name) {
  return fmt::format("there is no test '{}'", name.substr(0, 40));
}

bool apply_test(Evaluator& evaluator, const std::string& name, const Value& input, const Arguments& arguments) {
  const auto found = tests().find(name);
  if (found == tests().end()) fail("{}", unknown_test_message(name));
  const TestEntry& entry = found->second;
  evaluator.budget().charge(input.is(ValueKind::kString) ? input.as_text().size() : 0);
  if (!entry.takes_argument) {
    bind(name, arguments, {}, 0);
    return entry.test(evaluator, input, nullptr);
  }
  const auto bound = bind(name, arguments, {"other"}, 1);
  return entry.test(evaluator, input, bound[0]);
}

}  // namespace tessera::text::jinja
