#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>

#include "tessera/text/jinja/parser.h"

namespace tessera::text::jinja {

ExpressionPtr Parser::make(ExpressionKind kind, int line) const {
  auto node = std::make_unique<Expression>();
  node->kind = kind;
  node->line = line;
  return node;
}

// The depth of a node is 1 + the largest depth of its children. The limit keeps the recursion of the evaluator and of
// the tree's destructor within the stack.
ExpressionPtr Parser::with_checked_depth(ExpressionPtr node) const {
  const auto include = [&](const ExpressionPtr& child) {
    if (child) node->depth = std::max(node->depth, child->depth + 1);
  };
  for (const auto& operand : node->operands) include(operand);
  if (node->arguments) {
    for (const auto& argument : node->arguments->positional) include(argument);
    for (const auto& argument : node->arguments->named) include(argument.second);
    include(node->arguments->unpacked_list);
    include(node->arguments->unpacked_named);
  }
  if (node->depth > max_depth_) fail_here(fmt::format("an expression is nested deeper than {}", max_depth_));
  return node;
}

ExpressionPtr Parser::wrap(ExpressionKind kind, int line, ExpressionPtr operand) const {
  auto node = make(kind, line);
  node->operands.push_back(std::move(operand));
  return with_checked_depth(std::move(node));
}

// Each function from here to unary() parses one level of Jinja2's precedence, from the weakest operator to the
// strongest: if-else, or, and, not, comparisons, + -, ~, * / // %, **, unary signs.
ExpressionPtr Parser::expression(bool conditional) {
  const ScopedValue nested(nesting_, next_nesting());
  if (!conditional) return or_expression();
  const int line = current().line;
  const size_t unknown_before = unknown_names_.size();
  auto value = or_expression();
  // `value` is a branch of a conditional expression. It may never be evaluated, so its unknown filters are no parse
  // errors.
  if (at_name("if")) unknown_names_.resize(unknown_before);
  while (skip_name("if")) {
    ScopedValue<bool> branch_scope(in_branch_, true);
    auto node = make(ExpressionKind::kConditional, line);
    node->operands.push_back(or_expression());
    node->operands.push_back(std::move(value));
    node->operands.push_back(skip_name("else") ? expression() : nullptr);
    value = with_checked_depth(std::move(node));
  }
  return value;
}

std::optional<Operator> Parser::accept_operator(Operators operators) {
  for (const auto& [text, op] : operators) {
    if (!at_name(text) && !at_operator(text)) continue;
    if (op == Operator::kNotIn) {  // the operator is the two names "not" "in"
      if (ahead().kind != TokenKind::kName || ahead().text != "in") continue;
      next();
    }
    next();
    return op;
  }
  return std::nullopt;
}

template <class Operand>
ExpressionPtr Parser::chain(ExpressionKind kind, Operators operators, Operand operand, std::optional<int> line) {
  auto first = operand();
  const int node_line = line.value_or(current().line);
  auto op = accept_operator(operators);
  if (!op) return first;
  auto node = make(kind, node_line);
  node->operands.push_back(std::move(first));
  for (; op; op = accept_operator(operators)) {
    node->operators.push_back(*op);
    node->operands.push_back(operand());
  }
  return with_checked_depth(std::move(node));
}

ExpressionPtr Parser::or_expression() {
  return chain(ExpressionKind::kOr, {{"or", Operator::kOr}}, [&] { return and_expression(); });
}

ExpressionPtr Parser::and_expression() {
  return chain(ExpressionKind::kAnd, {{"and", Operator::kAnd}}, [&] { return not_expression(); });
}

ExpressionPtr Parser::not_expression() {
  if (!at_name("not")) return comparison();
  const ScopedValue nested(nesting_, next_nesting());
  const int line = next().line;
  return wrap(ExpressionKind::kNot, line, not_expression());
}

ExpressionPtr Parser::comparison() {
  const Operators operators = {
      {"==", Operator::kEqual},  {"!=", Operator::kNotEqual},     {"<", Operator::kLess}, {"<=", Operator::kLessEqual},
      {">", Operator::kGreater}, {">=", Operator::kGreaterEqual}, {"in", Operator::kIn},  {"not", Operator::kNotIn}};
  return chain(
      ExpressionKind::kCompare, operators, [&] { return sum(); }, current().line);
}

ExpressionPtr Parser::sum() {
  const Operators operators = {{"+", Operator::kAdd}, {"-", Operator::kSubtract}};
  return chain(ExpressionKind::kArithmetic, operators, [&] { return concatenation(); });
}

ExpressionPtr Parser::concatenation() {
  return chain(ExpressionKind::kConcat, {{"~", Operator::kConcat}}, [&] { return product(); });
}

ExpressionPtr Parser::product() {
  const Operators operators = {
      {"*", Operator::kMultiply}, {"/", Operator::kDivide}, {"//", Operator::kFloorDivide}, {"%", Operator::kModulo}};
  return chain(
      ExpressionKind::kArithmetic, operators, [&] { return power(); }, current().line);
}

ExpressionPtr Parser::power() {  // left-associative, as in Jinja2 and unlike Python
  return chain(ExpressionKind::kArithmetic, {{"**", Operator::kPower}}, [&] { return unary(true); });
}

// Filters and tests bind weaker than a sign: -1|abs is (-1)|abs. So the call that parses the operand of a sign has
// `with_filter` false, and only the outermost call parses filters and tests.
ExpressionPtr Parser::unary(bool with_filter) {
  const ScopedValue nested(nesting_, next_nesting());
  const int line = current().line;
  ExpressionPtr node;
  if (skip_operator("-")) {
    node = wrap(ExpressionKind::kNegative, line, unary(false));
  } else if (skip_operator("+")) {
    node = wrap(ExpressionKind::kPositive, line, unary(false));
  } else {
    node = primary();
  }
  node = postfix(std::move(node));
  return with_filter ? filters_and_tests(std::move(node)) : std::move(node);
}

ExpressionPtr Parser::number() {
  const Token token = next();
  auto node = make(ExpressionKind::kLiteral, token.line);
  if (token.kind == TokenKind::kFloat) {
    node->literal = Value::real(std::strtod(token.text.c_str(), nullptr));
    return node;
  }
  std::string_view digits = token.text;
  int base = 10;
  if (digits.size() > 1 && digits[0] == '0') {
    const char letter = static_cast<char>(digits[1] | 0x20);
    base = letter == 'x' ? 16 : letter == 'o' ? 8 : letter == 'b' ? 2 : 10;
    if (base != 10) digits.remove_prefix(2);
  }
  int64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value, base);
  if (error != std::errc() || end != digits.data() + digits.size()) {
    fail_here(fmt::format("the number '{}' does not fit 64 bits", token.text.substr(0, 40)));
  }
  node->literal = Value::integer(value);
  return node;
}

// A literal, a name, or an expression in brackets. Adjacent strings are joined, as in Python. The names that a macro's
// body contains decide whether the macro has `caller`, `varargs` and `kwargs`.
ExpressionPtr Parser::primary() {
  const int line = current().line;
  switch (current().kind) {
    case TokenKind::kName: {
      const std::string name = next().text;
      auto node = make(ExpressionKind::kLiteral, line);
      if (name == "true" || name == "True" || name == "false" || name == "False") {
        node->literal = Value::boolean(name == "true" || name == "True");
      } else if (name == "none" || name == "None") {
        node->literal = Value::none();
      } else {
        node->kind = ExpressionKind::kName;
        node->text = name;
        if (macro_) {
          macro_->uses_caller |= name == "caller";
          macro_->uses_varargs |= name == "varargs";
          macro_->uses_kwargs |= name == "kwargs";
        }
      }
      return node;
    }
    case TokenKind::kString: {
      std::string text;
      while (current().kind == TokenKind::kString) text += next().text;
      auto node = make(ExpressionKind::kLiteral, line);
      node->literal = Value::text(std::move(text));
      return node;
    }
    case TokenKind::kInteger:
    case TokenKind::kFloat:
      return number();
    default:
      break;
  }
  if (skip_operator("(")) {
    auto node = tuple(true, "", true);
    expect_operator(")");
    return node;
  }
  if (at_operator("[")) return list();
  if (at_operator("{")) return dict();
  unexpected("an expression");
}

bool Parser::at_tuple_end(std::string_view end_name) const {
  return current().kind == TokenKind::kPrintEnd || current().kind == TokenKind::kBlockEnd || at_operator(")") ||
         (!end_name.empty() && at_name(end_name));
}

// Parses one expression, or a tuple when a comma follows. Only "()" may be empty.
ExpressionPtr Parser::tuple(bool conditional, std::string_view end_name, bool in_parentheses) {
  auto node = make(ExpressionKind::kTuple, current().line);
  bool is_tuple = false;
  for (;;) {
    if (at_tuple_end(end_name)) break;
    node->operands.push_back(expression(conditional));
    if (!skip_operator(",")) break;
    is_tuple = true;
  }
  if (!is_tuple) {
    if (!node->operands.empty()) return std::move(node->operands[0]);
    if (!in_parentheses) unexpected("an expression");
  }
  return with_checked_depth(std::move(node));
}

ExpressionPtr Parser::list() {
  auto node = make(ExpressionKind::kList, next().line);
  while (!at_operator("]")) {
    if (!node->operands.empty()) expect_operator(",");
    if (at_operator("]")) break;
    node->operands.push_back(expression());
  }
  expect_operator("]");
  return with_checked_depth(std::move(node));
}

ExpressionPtr Parser::dict() {
  auto node = make(ExpressionKind::kDict, next().line);
  while (!at_operator("}")) {
    if (!node->operands.empty()) expect_operator(",");
    if (at_operator("}")) break;
    node->operands.push_back(expression());
    expect_operator(":");
    node->operands.push_back(expression());
  }
  expect_operator("}");
  return with_checked_depth(std::move(node));
}

}  // namespace tessera::text::jinja
