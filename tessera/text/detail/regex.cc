#define PCRE2_CODE_UNIT_WIDTH 8
#include "tessera/text/detail/regex.h"

#include <pcre2.h>

#include "tessera/base/error.h"
#include "tessera/text/detail/unicode.h"

namespace tessera::text {
namespace {

constexpr size_t kMaxPatternBytes = 1 << 16;
constexpr size_t kMaxNesting = 100;
constexpr uint32_t kMatchLimit = 10'000'000;
constexpr uint32_t kHeapLimitKib = 64 * 1024;
constexpr size_t kJitStackBytes = 1 << 20;

// Rewrites what Oniguruma and PCRE2 read differently: \s \S \w \W \h, and {n,m}+ (a repeat there, possessive here).
class Translator {
 public:
  Translator(std::string_view pattern, const std::string& where) : in_(pattern), where_(where) {}

  std::string run() {
    std::vector<size_t> groups;  // where each open group starts in out_
    size_t atom = 0;             // where the last atom starts in out_
    while (at_ < in_.size()) {
      const char c = in_[at_];
      if (c == '\\') {
        atom = out_.size();
        escape(false);
      } else if (c == '[') {
        atom = out_.size();
        character_class();
      } else if (c == '(') {
        if (groups.size() >= kMaxNesting) fail("groups nested deeper than 100");
        groups.push_back(out_.size());
        out_ += in_[at_++];
      } else if (c == ')') {
        if (groups.empty()) fail("a ')' without '('");
        atom = groups.back();
        groups.pop_back();
        out_ += in_[at_++];
      } else if (c == '{' && interval_length() > 0) {
        out_.append(in_.substr(at_, interval_length()));
        at_ += interval_length();
        if (at_ < in_.size() && in_[at_] == '+') {
          out_.insert(atom, "(?:");
          out_ += ')';
        }
      } else {
        if (c != '*' && c != '+' && c != '?') atom = out_.size();
        const uint32_t length = utf8_length(c);
        out_.append(in_.substr(at_, length));
        at_ += length;
      }
    }
    return std::move(out_);
  }

 private:
  [[noreturn]] void fail(std::string_view what) const {
    raise(ErrorKind::kFormat, "[text.load] {}: pattern '{}': found {} at byte {}, which is not supported", where_, in_, what, at_);
  }

  // Length of "{n}", "{n,}", "{,m}" or "{n,m}" at at_, or 0.
  size_t interval_length() const {
    size_t i = at_ + 1, digits = 0;
    for (; i < in_.size() && ((in_[i] >= '0' && in_[i] <= '9') || in_[i] == ','); ++i) digits += in_[i] != ',';
    return digits > 0 && i < in_.size() && in_[i] == '}' ? i + 1 - at_ : 0;
  }

  void escape(bool in_class) {
    if (at_ + 1 >= in_.size()) fail("a lone '\\'");
    constexpr std::string_view kWordSet = "\\p{L}\\p{M}\\p{Nd}\\p{Pc}";
    const char c = in_[at_ + 1];
    switch (c) {
      case 's': out_ += "\\p{White_Space}"; break;
      case 'S': out_ += "\\P{White_Space}"; break;
      case 'd': out_ += "\\p{Nd}"; break;
      case 'D': out_ += "\\P{Nd}"; break;
      case 'w':
        if (in_class) out_ += kWordSet;
        else out_.append("[").append(kWordSet).append("]");
        break;
      case 'W':
        if (in_class) fail("'\\W' inside a class");
        out_.append("[^").append(kWordSet).append("]");
        break;
      case 'h': out_ += in_class ? "0-9a-fA-F" : "[0-9a-fA-F]"; break;
      case 'H': case 'R': case 'X': case 'K': case 'G': case 'y': case 'Y': case 'C': case 'Q': case 'E': case 'N': case 'O':
        fail(std::string("'\\") + c + "'");
      default:
        out_ += '\\';
        out_.append(in_.substr(at_ + 1, utf8_length(c)));
        at_ += 1 + utf8_length(c);
        if (at_ < in_.size() && in_[at_] == '{' && std::string_view("pPxo").find(c) != std::string_view::npos) {
          const size_t close = in_.find('}', at_);
          if (close == std::string_view::npos) fail(std::string("'\\") + c + "{' without '}'");
          out_.append(in_.substr(at_, close + 1 - at_));
          at_ = close + 1;
        }
        return;
    }
    at_ += 2;
  }

  void character_class() {
    out_ += in_[at_++];
    if (at_ < in_.size() && in_[at_] == '^') out_ += in_[at_++];
    if (at_ < in_.size() && in_[at_] == ']') {
      out_ += "\\]";
      ++at_;
    }
    for (; at_ < in_.size() && in_[at_] != ']';) {
      if (in_[at_] == '\\') {
        escape(true);
      } else if (in_.substr(at_, 2) == "&&") {
        fail("'&&' inside a class");
      } else if (in_[at_] == '[') {
        const size_t close = in_.substr(at_, 2) == "[:" ? in_.find(":]", at_) : std::string_view::npos;
        if (close == std::string_view::npos) fail("a class inside a class");
        out_.append(in_.substr(at_, close + 2 - at_));
        at_ = close + 2;
      } else {
        const uint32_t length = utf8_length(in_[at_]);
        out_.append(in_.substr(at_, length));
        at_ += length;
      }
    }
    if (at_ >= in_.size()) fail("a class without ']'");
    out_ += in_[at_++];
  }

  std::string_view in_;
  const std::string& where_;
  std::string out_;
  size_t at_ = 0;
};

}  // namespace

std::string translate_pattern(std::string_view pattern, const std::string& where) { return Translator(pattern, where).run(); }

struct RegexScratch::Data {
  pcre2_match_data* match = pcre2_match_data_create(1, nullptr);
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  pcre2_jit_stack* stack = pcre2_jit_stack_create(32 * 1024, kJitStackBytes, nullptr);
  Data() {
    if (!match || !context || !stack) throw std::bad_alloc();
    pcre2_set_match_limit(context, kMatchLimit);
    pcre2_set_heap_limit(context, kHeapLimitKib);
    pcre2_jit_stack_assign(context, nullptr, stack);
  }
  ~Data() {
    pcre2_match_data_free(match);
    pcre2_match_context_free(context);
    pcre2_jit_stack_free(stack);
  }
};

RegexScratch::RegexScratch() : data_(std::make_unique<Data>()) {}
RegexScratch::~RegexScratch() = default;

struct Regex::Code {
  pcre2_code* code = nullptr;
  ~Code() { pcre2_code_free(code); }
};

Regex::Regex(std::string_view pattern, std::string where)
    : pattern_(pattern), where_(std::move(where)), code_(std::make_unique<Code>()) {
  TESSERA_CHECK(pattern.size() <= kMaxPatternBytes, ErrorKind::kFormat, "[text.load] {}: pattern of {} bytes, at most {} allowed",
                where_, pattern.size(), kMaxPatternBytes);
  const std::string translated = translate_pattern(pattern, where_);
  std::unique_ptr<pcre2_compile_context, void (*)(pcre2_compile_context*)> context(pcre2_compile_context_create(nullptr),
                                                                                  pcre2_compile_context_free);
  if (!context) throw std::bad_alloc();
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  pcre2_set_parens_nest_limit(context.get(), kMaxNesting);
  int error = 0;
  PCRE2_SIZE error_at = 0;
  code_->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                              PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &error, &error_at, context.get());
  if (!code_->code) {
    PCRE2_UCHAR message[200];
    pcre2_get_error_message(error, message, sizeof message);
    raise(ErrorKind::kFormat, "[text.load] {}: pattern '{}' does not compile: {}", where_, pattern_,
          reinterpret_cast<const char*>(message));
  }
  pcre2_jit_compile(code_->code, PCRE2_JIT_COMPLETE);  // where there is no JIT the interpreter runs
}

Regex::~Regex() = default;

void Regex::find_all(std::string_view text, RegexScratch& scratch, std::vector<Span>& matches) const {
  const auto subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  const PCRE2_SIZE* bounds = pcre2_get_ovector_pointer(scratch.data_->match);
  size_t at = 0, last_end = std::string_view::npos;
  while (at <= text.size()) {
    const int found = pcre2_match(code_->code, subject, text.size(), at, PCRE2_NO_UTF_CHECK, scratch.data_->match, scratch.data_->context);
    if (found == PCRE2_ERROR_NOMATCH) return;
    TESSERA_CHECK(found >= 0, ErrorKind::kFormat,
                  "[text.encode] {}: pattern '{}' gave up on a text of {} bytes (PCRE2 error {}): too many steps or too much memory. "
                  "Use a simpler pattern or shorter texts.",
                  where_, pattern_, text.size(), found);
    const size_t begin = bounds[0], end = bounds[1];
    TESSERA_CHECK(begin <= end && begin >= at, ErrorKind::kFormat, "[text.encode] {}: pattern '{}' matches backwards", where_, pattern_);
    const bool empty = begin == end;
    if (!empty || begin != last_end) {
      matches.push_back({static_cast<uint32_t>(begin), static_cast<uint32_t>(end)});
      last_end = end;
    }
    at = end;
    if (empty) at += at < text.size() ? utf8_length(text[at]) : 1;
  }
}

}  // namespace tessera::text
