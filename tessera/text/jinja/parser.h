// Parses a template to a syntax tree, with Jinja2's grammar. Like Jinja2's compiler, the parser reports an unknown
// filter or test, unless it is in a branch that may never run. In such a branch, the filter or test fails only when it
// is evaluated.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/text/jinja/ast.h"
#include "tessera/text/jinja/lexer.h"
#include "tessera/text/jinja/scoped.h"

namespace tessera::text::jinja {

struct ParsedTemplate {
  Body body;
  bool has_generation = false;
  bool reads_clock = false;  // the template contains the name strftime_now
  // All text that the template itself can write: its text and its string literals, each between two null characters.
  std::string literals = std::string(1, '\0');
};

// Parses the text of a template. Throws TemplateSyntaxError for a text that is not a valid template, or whose blocks
// and expressions are nested deeper than `max_depth`.
ParsedTemplate parse_template(std::string_view source, int max_depth);

// The recursive descent parser of one template. Statements are in parser.cc, expressions in parser_expression.cc and
// parser_postfix.cc.
class Parser {
 public:
  Parser(std::vector<Token> tokens, int max_depth) : tokens_(std::move(tokens)), max_depth_(max_depth) {}
  ParsedTemplate run();

 private:
  using EndWords = std::initializer_list<std::string_view>;

  const Token& current() const { return tokens_[at_]; }
  const Token& ahead() const { return tokens_[std::min(at_ + 1, tokens_.size() - 1)]; }
  Token next();  // returns the current token and moves to the next one
  [[noreturn]] void fail_here(const std::string& message) const;
  [[noreturn]] void unexpected(std::string_view expected) const;
  bool at_operator(std::string_view text) const {
    return current().kind == TokenKind::kOperator && current().text == text;
  }
  bool at_name(std::string_view text) const { return current().kind == TokenKind::kName && current().text == text; }
  // When the current token is the expected one, skip_ and expect_ functions move to the next token, and skip_ functions
  // return true. Otherwise skip_ functions return false, and expect_ functions fail.
  bool skip_operator(std::string_view text);
  bool skip_name(std::string_view text);
  void expect_operator(std::string_view text);
  std::string expect_name();
  void expect_block_end();

  Body body_until(EndWords words);  // the end word is then the current token
  Body body_to(std::string_view end_word);
  void text_or_print(Body& body);
  void statement(Body& body);
  Statement if_statement();
  Statement for_statement();
  Statement set_statement();
  Statement macro_statement();
  Statement call_statement();
  Statement with_statement();
  void print_statement(Body& body);
  void signature(MacroDefinition& macro);
  void macro_body(MacroDefinition& macro, std::string_view end_word);
  AssignmentTarget target(bool namespaces, std::string_view end_name);
  AssignmentTarget one_target(bool namespaces);

  using Operators = std::initializer_list<std::pair<std::string_view, Operator>>;
  // Reads the operator at the current token, if it is one of `operators`.
  std::optional<Operator> accept_operator(Operators operators);
  // Parses operands with `operators` between them to one node; a single operand is returned as it is. The node has the
  // line `line`, or without `line` the line of its first operator.
  template <class Operand>
  ExpressionPtr chain(ExpressionKind kind, Operators operators, Operand operand, std::optional<int> line = {});
  ExpressionPtr expression(bool conditional = true);
  ExpressionPtr or_expression();
  ExpressionPtr and_expression();
  ExpressionPtr not_expression();
  ExpressionPtr comparison();
  ExpressionPtr sum();
  ExpressionPtr concatenation();
  ExpressionPtr product();
  ExpressionPtr power();
  ExpressionPtr unary(bool with_filter);
  ExpressionPtr primary();
  ExpressionPtr postfix(ExpressionPtr of);
  ExpressionPtr filters_and_tests(ExpressionPtr of);
  ExpressionPtr filter_chain(ExpressionPtr of, bool starts_inline);
  ExpressionPtr test(ExpressionPtr of);
  ExpressionPtr subscript(ExpressionPtr of);
  ExpressionPtr subscript_part();
  ExpressionPtr call(ExpressionPtr of);
  std::unique_ptr<CallArguments> call_arguments();
  ExpressionPtr tuple(bool conditional, std::string_view end_name, bool in_parentheses);
  bool at_tuple_end(std::string_view end_name) const;
  ExpressionPtr number();
  ExpressionPtr list();
  ExpressionPtr dict();

  ExpressionPtr make(ExpressionKind kind, int line) const;
  ExpressionPtr with_checked_depth(ExpressionPtr node) const;  // sets the node's depth and checks the limit
  ExpressionPtr wrap(ExpressionKind kind, int line, ExpressionPtr operand) const;

  // nesting_ + 1. Throws TemplateSyntaxError when this exceeds the limit.
  int next_nesting() const;

  std::vector<Token> tokens_;
  int max_depth_;
  size_t at_ = 0;
  int nesting_ = 0;                                 // depth of the parser's own recursion
  int loops_ = 0;                                   // number of loops around the current position
  bool in_branch_ = false;                          // inside a branch, where an unknown filter fails only when it runs
  std::vector<TemplateSyntaxError> unknown_names_;  // unknown filters and tests outside of branches
  bool has_generation_ = false;
  MacroDefinition* macro_ = nullptr;  // the innermost macro around the current position
};

}  // namespace tessera::text::jinja
