#include "tessera/text/jinja/parser.h"

#include <fmt/format.h>

#include <algorithm>

#include "tessera/text/jinja/evaluator.h"

namespace tessera::text::jinja {

ParsedTemplate parse_template(std::string_view source, int max_depth) {
  return Parser(tokenize(source), max_depth).run();
}

// In `literals` each text and each string literal is between null characters, so ChatTemplate::has_literal() finds only
// whole literals.
ParsedTemplate Parser::run() {
  ParsedTemplate result;
  for (const Token& token : tokens_) {
    const bool text = token.kind == TokenKind::kData || token.kind == TokenKind::kString;
    if (text && !token.text.empty()) (result.literals += token.text) += '\0';
    result.reads_clock |= token.kind == TokenKind::kName && token.text == "strftime_now";
  }
  result.body = body_until({});
  if (!unknown_names_.empty()) throw unknown_names_.front();
  result.has_generation = has_generation_;
  return result;
}

int Parser::next_nesting() const {
  if (nesting_ >= max_depth_) fail_here(fmt::format("blocks and expressions are nested deeper than {}", max_depth_));
  return nesting_ + 1;
}

// Returns the current token and moves to the next one. The parser never moves past the last token, kEnd, so current()
// is always valid.
Token Parser::next() {
  Token token = tokens_[at_];
  if (at_ + 1 < tokens_.size()) ++at_;
  return token;
}

void Parser::fail_here(const std::string& message) const { throw TemplateSyntaxError{current().line, message}; }

void Parser::unexpected(std::string_view expected) const {
  switch (current().kind) {
    case TokenKind::kEnd:
      fail_here(fmt::format("the template ends, wanted {}", expected));
    case TokenKind::kBlockEnd:
    case TokenKind::kPrintEnd:
      fail_here(fmt::format("the tag ends, wanted {}", expected));
    default:
      fail_here(fmt::format("found '{}', wanted {}", current().text.substr(0, 40), expected));
  }
}

bool Parser::skip_operator(std::string_view text) {
  if (!at_operator(text)) return false;
  next();
  return true;
}

bool Parser::skip_name(std::string_view text) {
  if (!at_name(text)) return false;
  next();
  return true;
}

void Parser::expect_operator(std::string_view text) {
  if (!skip_operator(text)) unexpected(fmt::format("'{}'", text));
}

std::string Parser::expect_name() {
  if (current().kind != TokenKind::kName) unexpected("a name");
  return next().text;
}

void Parser::expect_block_end() {
  if (current().kind != TokenKind::kBlockEnd) unexpected("'%}'");
  next();
}

void Parser::text_or_print(Body& body) {
  const int line = current().line;
  if (current().kind == TokenKind::kData) {
    body.push_back({.kind = StatementKind::kText, .line = line, .text = next().text});
    return;
  }
  next();
  body.push_back({.kind = StatementKind::kPrint, .line = line, .value = tuple(true, "", false)});
  if (current().kind != TokenKind::kPrintEnd) unexpected("'}}'");
  next();
}

// Parses text, print tags and statements up to a tag that begins with one of `words`; without words up to the end of
// the template.
Body Parser::body_until(EndWords words) {
  const ScopedValue nested(nesting_, next_nesting());
  Body body;
  for (;;) {
    if (current().kind == TokenKind::kEnd) {
      if (words.size() == 0) return body;
      fail_here(fmt::format("the template ends, wanted '{}'", *(words.end() - 1)));
    }
    if (current().kind != TokenKind::kBlockBegin) {
      text_or_print(body);
      continue;
    }
    next();
    if (std::ranges::any_of(words, [&](std::string_view word) { return at_name(word); })) return body;
    statement(body);
    expect_block_end();
  }
}

Body Parser::body_to(std::string_view end_word) {
  expect_block_end();
  Body body = body_until({end_word});
  next();
  return body;
}

// in_branch_ is set in the branches of `if`. Loops, macros and the blocks of set, filter and generation reset it to
// false: Jinja2's compiler starts a new frame for their bodies and reports unknown filters in them.
void Parser::statement(Body& body) {
  if (current().kind != TokenKind::kName) unexpected("a tag name");
  const std::string word = current().text;
  const int line = current().line;
  Statement made{};
  if (word == "if") {
    made = if_statement();
  } else if (word == "for") {
    made = for_statement();
  } else if (word == "set") {
    made = set_statement();
  } else if (word == "macro") {
    made = macro_statement();
  } else if (word == "call") {
    made = call_statement();
  } else if (word == "with") {
    made = with_statement();
  } else if (word == "print") {
    return print_statement(body);
  } else if (word == "filter") {
    next();
    made.kind = StatementKind::kFilterBlock;
    ScopedValue<bool> branch_scope(in_branch_, false);
    made.value = filter_chain(nullptr, true);
    made.body = body_to("endfilter");
  } else if (word == "generation") {
    next();
    made.kind = StatementKind::kGeneration;
    has_generation_ = true;
    ScopedValue<bool> branch_scope(in_branch_, false);
    ScopedValue<int> loops(loops_, 0);
    made.body = body_to("endgeneration");
  } else if (word == "break" || word == "continue") {
    if (loops_ == 0) fail_here(fmt::format("'{}' is outside of a loop", word));
    next();
    made.kind = word == "break" ? StatementKind::kBreak : StatementKind::kContinue;
  } else {
    fail_here(fmt::format("'{}' is no tag that chat templates can use", word.substr(0, 40)));
  }
  made.line = line;
  body.push_back(std::move(made));
}

Statement Parser::if_statement() {
  Statement made{.kind = StatementKind::kIf};
  ScopedValue<bool> branch_scope(in_branch_, true);
  for (;;) {
    next();  // if or elif
    IfBranch branch;
    branch.condition = tuple(false, "", false);
    expect_block_end();
    branch.body = body_until({"elif", "else", "endif"});
    made.branches.push_back(std::move(branch));
    if (!at_name("elif")) break;
  }
  if (skip_name("else")) {
    expect_block_end();
    made.otherwise = body_until({"endif"});
  }
  next();
  return made;
}

// for TARGET in ITEMS [if CONDITION] [recursive]. break and continue are allowed in the body, not in the else branch of
// the outermost loop.
Statement Parser::for_statement() {
  next();
  Statement made{.kind = StatementKind::kFor};
  made.target = target(false, "in");
  if (!skip_name("in")) unexpected("'in'");
  made.value = tuple(false, "recursive", false);
  ScopedValue<bool> branch_scope(in_branch_, false);
  if (skip_name("if")) made.condition = expression();
  made.recursive = skip_name("recursive");
  expect_block_end();
  {
    ScopedValue<int> loops(loops_, loops_ + 1);
    made.body = body_until({"endfor", "else"});
  }
  if (skip_name("else")) {
    expect_block_end();
    made.otherwise = body_until({"endfor"});
  }
  next();
  return made;
}

Statement Parser::set_statement() {
  next();
  AssignmentTarget name = target(true, "");
  if (skip_operator("=")) {
    return {.kind = StatementKind::kSet, .value = tuple(true, "", false), .target = std::move(name)};
  }
  Statement made{.kind = StatementKind::kSetBlock, .target = std::move(name)};
  ScopedValue<bool> branch_scope(in_branch_, false);
  if (at_operator("|")) made.value = filter_chain(nullptr, false);
  made.body = body_to("endset");
  return made;
}

void Parser::signature(MacroDefinition& macro) {
  expect_operator("(");
  while (!at_operator(")")) {
    if (!macro.parameters.empty()) expect_operator(",");
    macro.parameters.push_back(expect_name());
    if (skip_operator("=")) {
      macro.defaults.push_back(expression());
    } else if (!macro.defaults.empty()) {
      fail_here("a parameter without default follows one with a default");
    }
  }
  expect_operator(")");
}

// The body of a macro is outside of the loops around its definition, so break and continue cannot leave it.
void Parser::macro_body(MacroDefinition& macro, std::string_view end_word) {
  ScopedValue<MacroDefinition*> inside(macro_, &macro);
  ScopedValue<int> loops(loops_, 0);
  ScopedValue<bool> branch_scope(in_branch_, false);
  macro.body = body_to(end_word);
}

Statement Parser::macro_statement() {
  next();
  auto macro = std::make_shared<MacroDefinition>();
  macro->name = expect_name();
  signature(*macro);
  macro_body(*macro, "endmacro");
  if (macro_) {  // the outer macro contains the names of the inner one
    macro_->uses_caller |= macro->uses_caller;
    macro_->uses_varargs |= macro->uses_varargs;
    macro_->uses_kwargs |= macro->uses_kwargs;
  }
  return {.kind = StatementKind::kMacro, .macro = std::move(macro)};
}

Statement Parser::call_statement() {
  next();
  auto macro = std::make_shared<MacroDefinition>();
  macro->name = "caller";
  if (at_operator("(")) signature(*macro);
  Statement made{.kind = StatementKind::kCallBlock};
  made.value = expression();
  if (made.value->kind != ExpressionKind::kCall) fail_here("'call' wants a call of a macro");
  macro_body(*macro, "endcall");
  made.macro = std::move(macro);
  return made;
}

Statement Parser::with_statement() {
  next();
  Statement made{.kind = StatementKind::kWith};
  while (current().kind != TokenKind::kBlockEnd) {
    if (!made.assignments.empty()) expect_operator(",");
    AssignmentTarget name = target(false, "");
    expect_operator("=");
    made.assignments.emplace_back(std::move(name), expression());
  }
  made.body = body_to("endwith");
  return made;
}

void Parser::print_statement(Body& body) {
  const int line = next().line;
  bool first = true;
  while (current().kind != TokenKind::kBlockEnd) {
    if (!first) expect_operator(",");
    first = false;
    body.push_back({.kind = StatementKind::kPrint, .line = line, .value = expression()});
  }
}

// Parses one target of an assignment. With `namespaces` it may also be name.attribute.
AssignmentTarget Parser::one_target(bool namespaces) {
  if (skip_operator("(")) {
    const ScopedValue nested(nesting_, next_nesting());
    AssignmentTarget inner = target(namespaces, "");
    expect_operator(")");
    return inner;
  }
  AssignmentTarget made;
  made.name = expect_name();
  static constexpr std::string_view kConstants[] = {"true", "false", "none", "True", "False", "None"};
  if (std::find(std::begin(kConstants), std::end(kConstants), made.name) != std::end(kConstants)) {
    fail_here(fmt::format("cannot assign to '{}'", made.name));
  }
  if (namespaces && skip_operator(".")) made.attribute = expect_name();
  return made;
}

AssignmentTarget Parser::target(bool namespaces, std::string_view end_name) {
  AssignmentTarget first = one_target(namespaces);
  if (!at_operator(",")) return first;
  AssignmentTarget all;
  all.parts.push_back(std::move(first));
  while (skip_operator(",")) {
    if (at_tuple_end(end_name) || at_operator("=")) break;
    all.parts.push_back(one_target(namespaces));
  }
  return all;
}

}  // namespace tessera::text::jinja
