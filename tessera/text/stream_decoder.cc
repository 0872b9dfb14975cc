#include "tessera/text/tokenizer.h"

namespace tessera::text {
namespace {

constexpr std::string_view kReplacement =
    "\xEF\xBF\xBD";  // U+FFFD; at the end of the text it may be a character whose last bytes have not come yet
constexpr size_t kMaxHeldTokens = 64;

// Returns `text` from byte `begin` on. A new token may change the decoded text of earlier tokens, when their bytes turn
// out not to be UTF-8. `begin` may then be inside a character; the other bytes of this character are skipped.
std::string from(const std::string& text, size_t begin) {
  while (begin < text.size() && (static_cast<unsigned char>(text[begin]) & 0xC0) == 0x80) ++begin;
  return begin < text.size() ? text.substr(begin) : std::string();
}

}  // namespace

StreamDecoder::StreamDecoder(Tokenizer tokenizer, bool skip_special_tokens)
    : tokenizer_(std::move(tokenizer)), skip_special_tokens_(skip_special_tokens) {}

std::string StreamDecoder::push(TokenId id) {
  // Some decoders drop the space of the first token of a text, so a new token is decoded together with the tokens of
  // the text that was returned last. Text that ends in U+FFFD is held back until more tokens complete the character,
  // for at most kMaxHeldTokens tokens.
  window_.push_back(id);
  std::string text = tokenizer_.decode(window_, skip_special_tokens_);
  if (text.size() <= emitted_bytes_) return {};
  if (text.ends_with(kReplacement) && window_.size() - context_ < kMaxHeldTokens) return {};
  std::string fresh = from(text, emitted_bytes_);
  window_.erase(window_.begin(), window_.begin() + static_cast<ptrdiff_t>(context_));
  context_ = window_.size();
  emitted_bytes_ = tokenizer_.decode(window_, skip_special_tokens_).size();
  return fresh;
}

std::string StreamDecoder::finish() {
  std::string rest = from(tokenizer_.decode(window_, skip_special_tokens_), emitted_bytes_);
  window_.clear();
  context_ = 0;
  emitted_bytes_ = 0;
  return rest;
}

}  // namespace tessera::text
