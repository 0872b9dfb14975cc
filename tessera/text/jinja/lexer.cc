#include "tessera/text/jinja/lexer.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>

#include "tessera/text/jinja/unicode.h"

namespace tessera::text::jinja {
namespace {

bool name_start(char c) { return std::isalpha(static_cast<unsigned char>(c)) || c == '_' || (c & 0x80); }
bool digit(char c) { return c >= '0' && c <= '9'; }
bool name_part(char c) { return name_start(c) || digit(c); }

// Replaces "\r\n" and "\r" by "\n" and removes one newline at the end, like Jinja2 without keep_trailing_newline.
std::string normalized(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] != '\r') {
      out += source[i];
    } else {
      out += '\n';
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    }
  }
  if (out.ends_with('\n')) out.pop_back();
  return out;
}

class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(normalized(source)) {}

  std::vector<Token> run() {
    while (at_ < source_.size()) text_and_tag();
    tokens_.push_back({TokenKind::kEnd, line_, ""});
    return std::move(tokens_);
  }

 private:
  [[noreturn]] void fail_here(const std::string& message) { throw TemplateSyntaxError{line_, message}; }
  std::string_view from(size_t at) const { return std::string_view(source_).substr(at); }
  std::string_view rest() const { return from(at_); }
  char peek(size_t at) const { return at < source_.size() ? source_[at] : '\0'; }

  void advance(size_t bytes) {
    line_ += static_cast<int>(std::count(source_.begin() + static_cast<std::ptrdiff_t>(at_),
                                         source_.begin() + static_cast<std::ptrdiff_t>(at_ + bytes), '\n'));
    at_ += bytes;
    if (bytes > 0) line_starting_ = source_[at_ - 1] == '\n';
  }

  size_t space_length(size_t from) const {
    size_t at = from;
    while (at < source_.size() && is_space(code_point_at(source_, at).code)) at += code_point_at(source_, at).bytes;
    return at - from;
  }

  // Applies whitespace control to the text before a tag, and adds the remaining text, if any, as a token. `sign` is the
  // character after the opening of the tag, or 0. '-' removes all whitespace before the tag. Otherwise, when
  // `strips_line` (lstrip_blocks; not for "{{"), whitespace from the line's begin to the tag is removed if the line has
  // no other text before the tag; '+' prevents this.
  void emit_text(std::string_view text, char sign, bool strips_line) {
    std::string_view kept = text;
    if (sign == '-') {
      kept = strip(text, false, true);
    } else if (sign != '+' && strips_line) {
      const size_t newline = text.rfind('\n');
      const size_t line_begin = newline == std::string_view::npos ? 0 : newline + 1;
      if ((line_begin > 0 || line_starting_) && strip(text.substr(line_begin), true, true).empty()) {
        kept = text.substr(0, line_begin);
      }
    }
    if (!kept.empty()) tokens_.push_back({TokenKind::kData, line_, std::string(kept)});
  }

  static char sign_of(std::string_view tag) {
    return tag.size() > 2 && (tag[2] == '-' || tag[2] == '+') ? tag[2] : '\0';
  }

  // Reads the text up to the next "{{", "{%" or "{#", and this tag. A '{' before another character is text.
  void text_and_tag() {
    size_t tag = at_;
    for (;; ++tag) {
      tag = source_.find('{', tag);
      if (tag == std::string::npos || tag + 1 >= source_.size()) {
        tokens_.push_back({TokenKind::kData, line_, std::string(rest())});
        return advance(source_.size() - at_);
      }
      const char kind = source_[tag + 1];
      if (kind == '{' || kind == '%' || kind == '#') break;
    }
    const char kind = source_[tag + 1];
    const char sign = sign_of(from(tag));
    emit_text(rest().substr(0, tag - at_), sign, kind != '{');
    advance(tag - at_ + 2 + (sign ? 1 : 0));
    if (kind == '#') return comment();
    if (kind == '%' && raw_block()) return;
    tokens_.push_back({kind == '%' ? TokenKind::kBlockBegin : TokenKind::kPrintBegin, line_, ""});
    inside_tag(kind == '%');
  }

  // The length of the tag end at `at`, or 0 when no tag ends there. "-%}" includes all whitespace after it. With
  // `trims` (trim_blocks) "%}" includes one newline after it, and "+%}" keeps this newline.
  size_t tag_end_length(size_t at, std::string_view end, bool trims) const {
    const bool strips = from(at).starts_with('-'), keeps = trims && from(at).starts_with('+');
    const size_t sign = strips || keeps ? 1 : 0, length = sign + end.size();
    if (!from(at + sign).starts_with(end)) return 0;
    if (strips) return length + space_length(at + length);
    return length + (trims && !keeps && from(at + length).starts_with('\n') ? 1 : 0);
  }

  bool tag_end(std::string_view end, bool trims) {
    const size_t length = tag_end_length(at_, end, trims);
    advance(length);
    return length > 0;
  }

  void comment() {
    const size_t end = source_.find("#}", at_);
    if (end == std::string::npos) fail_here("a comment has no end '#}'");
    const bool signed_end = end > at_ && (source_[end - 1] == '-' || source_[end - 1] == '+');
    advance(end - at_ - (signed_end ? 1 : 0));
    tag_end("#}", true);
  }

  // Reads "{% raw %} ... {% endraw %}" as text, when the tag at the current position is "raw".
  bool raw_block() {
    const size_t begin = at_ + space_length(at_);
    if (!from(begin).starts_with("raw")) return false;
    const size_t end = begin + 3 + space_length(begin + 3);
    const size_t length = tag_end_length(end, "%}", false);
    if (length == 0) return false;
    advance(end + length - at_);
    for (size_t tag = source_.find("{%", at_); tag != std::string::npos; tag = source_.find("{%", tag + 2)) {
      const char sign = sign_of(from(tag));
      size_t word = tag + 2 + (sign ? 1 : 0);
      word += space_length(word);
      if (!from(word).starts_with("endraw")) continue;
      word += 6;
      word += space_length(word);
      const size_t end_length = tag_end_length(word, "%}", true);
      if (end_length == 0) continue;
      emit_text(rest().substr(0, tag - at_), sign, true);
      advance(word + end_length - at_);
      return true;
    }
    fail_here("'{% raw %}' has no '{% endraw %}'");
  }

  // Reads the tokens of a tag. The tag ends at "%}" or "}}" only while no bracket is open, because "}}" may also close
  // two dicts.
  void inside_tag(bool block) {
    const int first_line = line_;
    std::string open;  // the open brackets, innermost last
    while (at_ < source_.size()) {
      if (open.empty() && tag_end(block ? "%}" : "}}", block)) {
        tokens_.push_back({block ? TokenKind::kBlockEnd : TokenKind::kPrintEnd, line_, ""});
        return;
      }
      if (const size_t space = space_length(at_); space > 0) {
        advance(space);
      } else if (digit(source_[at_])) {
        number();
      } else if (name_start(source_[at_])) {
        size_t end = at_;
        while (name_part(peek(end))) ++end;
        tokens_.push_back({TokenKind::kName, line_, source_.substr(at_, end - at_)});
        advance(end - at_);
      } else if (source_[at_] == '\'' || source_[at_] == '"') {
        string();
      } else {
        operator_token(open);
      }
    }
    line_ = first_line;
    fail_here(block ? "a tag has no end '%}'" : "a tag has no end '}}'");
  }

  // The end of the run of digits that starts at `at`. One underscore is allowed between two digits.
  size_t digits_from(size_t at, std::string_view digits = "0123456789") const {
    const auto is_digit = [&](size_t i) { return i < source_.size() && digits.find(source_[i]) != digits.npos; };
    size_t end = at;
    while (is_digit(end) || (end > at && peek(end) == '_' && is_digit(end + 1))) ++end;
    return end;
  }

  // Reads an integer or a float. After a '.', as in a.0.1, the digits are an index, so no fraction or exponent follows.
  void number() {
    size_t end = digits_from(at_);
    TokenKind kind = TokenKind::kInteger;
    if (at_ == 0 || source_[at_ - 1] != '.') {
      if (peek(end) == '.' && digit(peek(end + 1))) {
        kind = TokenKind::kFloat;
        end = digits_from(end + 1);
      }
      if (peek(end) == 'e' || peek(end) == 'E') {
        const bool has_sign = peek(end + 1) == '+' || peek(end + 1) == '-';
        const size_t exponent = end + (has_sign ? 2 : 1);
        if (digit(peek(exponent))) {
          kind = TokenKind::kFloat;
          end = digits_from(exponent);
        }
      }
    }
    if (kind == TokenKind::kInteger && source_[at_] == '0') {
      const char base = static_cast<char>(std::tolower(static_cast<unsigned char>(peek(at_ + 1))));
      end = digits_from(at_ + 2, base == 'x'   ? "0123456789abcdefABCDEF"
                                 : base == 'o' ? "01234567"
                                 : base == 'b' ? "01"
                                               : "");
      if (end == at_ + 2) end = digits_from(at_, "0");  // 007 is 00 and 7, as in Jinja2
    }
    std::string text = source_.substr(at_, end - at_);
    std::erase(text, '_');
    tokens_.push_back({kind, line_, std::move(text)});
    advance(end - at_);
  }

  void string() {
    const char quote = source_[at_];
    size_t end = at_ + 1;
    while (end < source_.size() && source_[end] != quote) end += source_[end] == '\\' ? 2 : 1;
    if (end >= source_.size()) fail_here("a string has no end");
    tokens_.push_back({TokenKind::kString, line_, unescaped(from(at_ + 1).substr(0, end - at_ - 1))});
    advance(end + 1 - at_);
  }

  int32_t hex_digits(std::string_view text, size_t at, size_t count) {
    const auto digits = text.substr(at, count);
    uint32_t value = 0;
    const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
    if (digits.size() < count || parsed.ptr != digits.data() + count) {
      fail_here("a string has an incomplete escape sequence");
    }
    if (value > 0x10ffff) fail_here("a string has an escape sequence above U+10FFFF");
    return static_cast<int32_t>(value);
  }

  // Decodes Python's unicode-escape. A pair of surrogates becomes one code point; a single surrogate has no UTF-8 form
  // and is an error.
  std::string unescaped(std::string_view text) {
    static constexpr std::string_view kFrom = "\\'\"abfnrtv", kTo = "\\'\"\a\b\f\n\r\t\v";
    std::string out;
    for (size_t i = 0; i < text.size(); ++i) {
      if (text[i] != '\\') {
        out += text[i];
        continue;
      }
      const char c = text[++i];
      if (const size_t at = kFrom.find(c); at != std::string_view::npos) {
        out += kTo[at];
      } else if (c >= '0' && c <= '7') {
        const auto digits = text.substr(i, 3);
        uint32_t value = 0;
        const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), value, 8);
        append_utf8(value, out);
        i += static_cast<size_t>(parsed.ptr - digits.data()) - 1;
      } else if (c == 'x' || c == 'u' || c == 'U') {
        const size_t count = c == 'x' ? 2 : c == 'u' ? 4 : 8;
        int32_t value = hex_digits(text, i + 1, count);
        i += count;
        if (value >= 0xd800 && value < 0xdc00 && text.substr(i + 1).starts_with("\\u")) {
          const int32_t low = hex_digits(text, i + 3, 4);
          if (low >= 0xdc00 && low < 0xe000) {
            value = 0x10000 + ((value - 0xd800) << 10) + (low - 0xdc00);
            i += 6;
          }
        }
        if (value >= 0xd800 && value < 0xe000) fail_here("a string has an escape sequence of a single surrogate");
        append_utf8(static_cast<uint32_t>(value), out);
      } else if (c == 'N') {
        fail_here("character names (\\N{...}) are not supported");
      } else if (c != '\n') {
        out += '\\';
        out += c;
      }
    }
    return out;
  }

  // Reads one operator token. kOperators lists longer operators first, so the first match is the longest one.
  void operator_token(std::string& open) {
    static constexpr std::array<std::string_view, 26> kOperators = {"//", "**", "==", "!=", ">=", "<=", "+", "-", "/",
                                                                    "*",  "%",  "~",  "[",  "]",  "(",  ")", "{", "}",
                                                                    ">",  "<",  "=",  ".",  ":",  "|",  ",", ";"};
    const auto* found = std::ranges::find_if(kOperators, [&](std::string_view op) { return rest().starts_with(op); });
    if (found == kOperators.end()) {
      fail_here(fmt::format("unexpected character '{}'", rest().substr(0, code_point_at(source_, at_).bytes)));
    }
    const char c = (*found)[0];
    if (c == '(' || c == '[' || c == '{') open += c;
    if (c == ')' || c == ']' || c == '}') {
      const char partner = c == ')' ? '(' : c == ']' ? '[' : '{';
      if (open.empty() || open.back() != partner) fail_here(fmt::format("unexpected '{}'", c));
      open.pop_back();
    }
    tokens_.push_back({TokenKind::kOperator, line_, std::string(*found)});
    advance(found->size());
  }

  std::string source_;
  size_t at_ = 0;
  int line_ = 1;
  bool line_starting_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(std::string_view source) { return Lexer(source).run(); }

}  // namespace tessera::text::jinja
