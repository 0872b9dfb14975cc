// Splits a template into text and the tokens of its tags, as Jinja2's lexer does with trim_blocks and lstrip_blocks.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::text::jinja {

enum class TokenKind {
  kData,
  kBlockBegin,
  kBlockEnd,
  kPrintBegin,
  kPrintEnd,
  kName,
  kString,
  kInteger,
  kFloat,
  kOperator,
  kEnd
};

struct Token {
  TokenKind kind;
  int line;
  std::string text;  // data, name, unescaped string, digits, operator
};

// A parse error: what and where. The public layer makes the Error of it.
struct SyntaxFailure {
  int line;
  std::string message;
};

// Failure: SyntaxFailure. The last token is kEnd.
std::vector<Token> tokenize(std::string_view source);

}  // namespace tessera::text::jinja
