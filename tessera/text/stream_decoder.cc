#include "tessera/text/tokenizer.h"

namespace tessera::text {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD: perhaps a character whose bytes are not all there yet
constexpr size_t kMaxHeldTokens = 64;

}  // namespace

StreamDecoder::StreamDecoder(Tokenizer tokenizer, bool skip_special_tokens)
    : tokenizer_(std::move(tokenizer)), skip_special_tokens_(skip_special_tokens) {}

std::string StreamDecoder::push(TokenId id) {
  // Decoders treat the first token of a text differently (they drop its space), so tokens are decoded behind the ones
  // that were emitted before them.
  window_.push_back(id);
  std::string text = tokenizer_.decode(window_, skip_special_tokens_);
  if (text.size() <= emitted_bytes_) return {};
  if (text.ends_with(kReplacement) && window_.size() - context_ < kMaxHeldTokens) return {};
  std::string fresh = text.substr(emitted_bytes_);
  window_.erase(window_.begin(), window_.begin() + static_cast<ptrdiff_t>(context_));
  context_ = window_.size();
  emitted_bytes_ = tokenizer_.decode(window_, skip_special_tokens_).size();
  return fresh;
}

std::string StreamDecoder::finish() {
  const std::string text = tokenizer_.decode(window_, skip_special_tokens_);
  std::string rest = text.size() > emitted_bytes_ ? text.substr(emitted_bytes_) : std::string();
  window_.clear();
  context_ = 0;
  emitted_bytes_ = 0;
  return rest;
}

}  // namespace tessera::text
