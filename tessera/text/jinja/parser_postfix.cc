// Parses the parts after a primary expression: attributes, subscripts, calls, filters and tests.
#include <fmt/format.h>

#include <algorithm>

#include "tessera/text/jinja/evaluator.h"
#include "tessera/text/jinja/parser.h"

namespace tessera::text::jinja {

ExpressionPtr Parser::postfix(ExpressionPtr of) {
  for (;;) {
    if (at_operator(".") || at_operator("[")) {
      of = subscript(std::move(of));
    } else if (at_operator("(")) {
      of = call(std::move(of));
    } else {
      return of;
    }
  }
}

ExpressionPtr Parser::filters_and_tests(ExpressionPtr of) {
  for (;;) {
    if (at_operator("|")) {
      of = filter_chain(std::move(of), false);
    } else if (at_name("is")) {
      of = test(std::move(of));
    } else if (at_operator("(")) {
      of = call(std::move(of));
    } else {
      return of;
    }
  }
}

// Parses "|NAME(ARGUMENTS)|...". `starts_inline`: the first filter has no '|' before it, as in {% filter NAME %}.
ExpressionPtr Parser::filter_chain(ExpressionPtr of, bool starts_inline) {
  while (starts_inline || at_operator("|")) {
    if (!starts_inline) next();
    starts_inline = false;
    auto node = make(ExpressionKind::kFilter, current().line);
    node->text = expect_name();
    while (skip_operator(".")) node->text += "." + expect_name();
    if (!in_branch_ && !has_filter(node->text)) {
      unknown_names_.push_back({node->line, unknown_filter_message(node->text)});
    }
    node->operands.push_back(std::move(of));
    node->arguments = at_operator("(") ? call_arguments() : std::make_unique<CallArguments>();
    of = with_checked_depth(std::move(node));
  }
  return of;
}

// Parses "is [not] NAME" with an argument in parentheses or, as in "is divisibleby 3", without them. "else", "or" and
// "and" after the name do not start an argument.
ExpressionPtr Parser::test(ExpressionPtr of) {
  const int line = next().line;
  const bool negated = skip_name("not");
  auto node = make(ExpressionKind::kTest, line);
  node->text = expect_name();
  while (skip_operator(".")) node->text += "." + expect_name();
  if (!in_branch_ && !has_test(node->text)) unknown_names_.push_back({node->line, unknown_test_message(node->text)});
  node->operands.push_back(std::move(of));
  node->arguments = std::make_unique<CallArguments>();
  const auto kind = current().kind;
  const bool starts_argument = kind == TokenKind::kName || kind == TokenKind::kString || kind == TokenKind::kInteger ||
                               kind == TokenKind::kFloat || at_operator("[") || at_operator("{");
  if (at_operator("(")) {
    node->arguments = call_arguments();
  } else if (starts_argument && !at_name("else") && !at_name("or") && !at_name("and")) {
    if (at_name("is")) fail_here("tests with 'is' cannot be chained");
    node->arguments->positional.push_back(postfix(primary()));
  }
  auto made = with_checked_depth(std::move(node));
  return negated ? wrap(ExpressionKind::kNot, line, std::move(made)) : std::move(made);
}

ExpressionPtr Parser::subscript(ExpressionPtr of) {
  const Token opening = next();
  if (opening.text == ".") {
    if (current().kind == TokenKind::kName) {
      auto node = wrap(ExpressionKind::kAttribute, opening.line, std::move(of));
      node->text = next().text;
      return node;
    }
    if (current().kind != TokenKind::kInteger) unexpected("a name or a number");
    auto node = make(ExpressionKind::kItem, opening.line);
    node->operands.push_back(std::move(of));
    node->operands.push_back(number());
    return with_checked_depth(std::move(node));
  }
  std::vector<ExpressionPtr> parts;
  while (!at_operator("]")) {
    if (!parts.empty()) expect_operator(",");
    parts.push_back(subscript_part());
  }
  expect_operator("]");
  auto node = make(ExpressionKind::kItem, opening.line);
  node->operands.push_back(std::move(of));
  if (parts.size() == 1) {
    node->operands.push_back(std::move(parts[0]));
  } else {
    const bool slices =
        std::ranges::any_of(parts, [](const auto& part) { return part->kind == ExpressionKind::kSlice; });
    if (slices) fail_here("a subscript with a comma has a slice, which is not supported");
    auto several = make(ExpressionKind::kTuple, opening.line);
    several->operands = std::move(parts);
    node->operands.push_back(with_checked_depth(std::move(several)));
  }
  return with_checked_depth(std::move(node));
}

ExpressionPtr Parser::subscript_part() {
  const int line = current().line;
  ExpressionPtr start;
  if (!at_operator(":")) {
    start = expression();
    if (!at_operator(":")) return start;
  }
  next();
  const auto bound = [&]() -> ExpressionPtr {
    return at_operator(":") || at_operator("]") || at_operator(",") ? nullptr : expression();
  };
  auto node = make(ExpressionKind::kSlice, line);
  node->operands.push_back(std::move(start));
  node->operands.push_back(bound());
  node->operands.push_back(skip_operator(":") ? bound() : nullptr);
  return with_checked_depth(std::move(node));
}

ExpressionPtr Parser::call(ExpressionPtr of) {
  auto node = make(ExpressionKind::kCall, current().line);
  node->operands.push_back(std::move(of));
  node->arguments = call_arguments();
  return with_checked_depth(std::move(node));
}

// Accepts the orders that Jinja2 accepts: positional arguments, then named ones and *args, then **kwargs.
std::unique_ptr<CallArguments> Parser::call_arguments() {
  expect_operator("(");
  auto made = std::make_unique<CallArguments>();
  const auto ensure = [&](bool allowed) {
    if (!allowed) fail_here("the arguments of a call are not in the order: positional, named or *args, **kwargs");
  };
  bool first = true;
  while (!at_operator(")")) {
    if (!first) {
      expect_operator(",");
      if (at_operator(")")) break;
    }
    first = false;
    if (skip_operator("*")) {
      ensure(!made->unpacked_list && !made->unpacked_named);
      made->unpacked_list = expression();
    } else if (skip_operator("**")) {
      ensure(!made->unpacked_named);
      made->unpacked_named = expression();
    } else if (current().kind == TokenKind::kName && ahead().kind == TokenKind::kOperator && ahead().text == "=") {
      ensure(!made->unpacked_named);
      std::string name = next().text;
      next();
      made->named.emplace_back(std::move(name), expression());
    } else {
      ensure(!made->unpacked_list && !made->unpacked_named && made->named.empty());
      made->positional.push_back(expression());
    }
  }
  expect_operator(")");
  return made;
}

}  // namespace tessera::text::jinja
