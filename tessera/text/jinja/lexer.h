// Splits a template into text and the tokens of its tags, like Jinja2's lexer with trim_blocks and lstrip_blocks.
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
  std::string text;  // the text, name, unescaped string, digits or operator
};

// A parse error with its line. ChatTemplate converts it to an Error.
struct TemplateSyntaxError {
  int line;
  std::string message;
};

// Splits the source of a template into tokens; the last token is kEnd. Throws TemplateSyntaxError if the source has a
// syntax error, such as a tag without an end.
std::vector<Token> tokenize(std::string_view source);

}  // namespace tessera::text::jinja
