#include "tessera/text/tokenizer/decoder.h"

#include <charconv>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/text/tokenizer/byte_level.h"
#include "tessera/text/tokenizer/normalizer.h"
#include "tessera/text/tokenizer/pre_tokenizer.h"

namespace tessera::text {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD
constexpr size_t kMaxDecodedBytes = size_t{1} << 32;

// Replaces a token in the byte-level alphabet by the bytes that it spells. Other tokens are not changed.
void replace_by_bytes(std::string& token) {
  if (auto bytes = bytes_of_token(token)) token = std::move(*bytes);
}

// Joins the bytes of all tokens before it reads them as UTF-8, because a character may be spread over several tokens.
DecoderStep byte_level_step() {
  const auto apply = [](std::vector<std::string>& tokens) {
    std::string bytes, text;
    for (auto& token : tokens) {
      replace_by_bytes(token);
      bytes += token;
    }
    append_lossy(bytes, text);
    tokens.assign(1, std::move(text));
  };
  return {.apply = apply, .apply_to_inner_token = replace_by_bytes, .joins_tokens = true};
}

DecoderStep replace_step(TextPattern pattern, std::string content) {
  const auto apply = [pattern = std::move(pattern), content = std::move(content)](std::vector<std::string>& tokens) {
    RegexScratch scratch;
    std::vector<Span> matches;
    size_t total = 0;
    for (auto& token : tokens) {
      matches.clear();
      pattern.find_all(token, scratch, matches);
      total += token.size() + matches.size() * content.size();  // checked before the text is built
      TESSERA_CHECK(total <= kMaxDecodedBytes, ErrorKind::kFormat,
                    "[text.decode] the decoder's Replace makes more than {} bytes", kMaxDecodedBytes);
      std::string text;
      size_t at = 0;
      for (const Span match : matches) {
        text.append(token, at, match.begin - at).append(content);
        at = match.end;
      }
      if (!matches.empty()) token = text.append(token, at);
    }
  };
  return {.apply = apply};
}

// The byte of a token "<0xHH>", or nullopt. HH is two hexadecimal digits, or '+' and one digit, as Rust's parser
// accepts them.
std::optional<char> fallback_byte(const std::string& token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return std::nullopt;
  unsigned value = 0;
  const char* begin = token.data() + (token[3] == '+' ? 4 : 3);
  const char* end = token.data() + 5;
  const auto [stop, error] = std::from_chars(begin, end, value, 16);
  if (error != std::errc() || stop != end || *begin == '-') return std::nullopt;
  return static_cast<char>(value);
}

// Joins consecutive byte tokens. As in the `tokenizers` library, a run that is not valid UTF-8 becomes one U+FFFD per
// byte.
DecoderStep byte_fallback_step() {
  const auto apply = [](std::vector<std::string>& tokens) {
    std::vector<std::string> result;
    std::string bytes;
    const auto flush = [&] {
      if (bytes.empty()) return;
      if (is_valid_utf8(bytes)) {
        result.push_back(bytes);
      } else {
        result.insert(result.end(), bytes.size(), std::string(kReplacement));
      }
      bytes.clear();
    };
    for (auto& token : tokens) {
      if (const auto byte = fallback_byte(token)) {
        bytes += *byte;
        continue;
      }
      flush();
      result.push_back(std::move(token));
    }
    flush();
    tokens = std::move(result);
  };
  const auto apply_to_inner_token = [](std::string& token) {
    if (const auto byte = fallback_byte(token)) token.assign(1, *byte);
  };
  return {.apply = apply, .apply_to_inner_token = apply_to_inner_token};
}

DecoderStep fuse_step() {
  const auto apply = [](std::vector<std::string>& tokens) {
    std::string text;
    for (const auto& token : tokens) text += token;
    tokens.assign(1, std::move(text));
  };
  return {.apply = apply, .joins_tokens = true};
}

DecoderStep strip_step(uint32_t character, uint64_t start, uint64_t stop) {
  std::string content;
  append_utf8(character, content);
  const auto apply = [content, start, stop](std::vector<std::string>& tokens) {
    for (auto& token : tokens) {
      std::string_view rest = token;
      for (uint64_t i = 0; i < start && rest.starts_with(content); ++i) rest.remove_prefix(content.size());
      for (uint64_t i = 0; i < stop && rest.ends_with(content); ++i) rest.remove_suffix(content.size());
      if (rest.size() != token.size()) token = std::string(rest);
    }
  };
  return {.apply = apply, .trims_ends = true};
}

// Replaces each `character`, the mark that Metaspace writes for a space, by a space. In the first token the marks are
// removed instead if `drops_first` is true (prepend_scheme is not "never").
DecoderStep metaspace_step(uint32_t character, bool drops_first) {
  std::string replacement;
  append_utf8(character, replacement);
  const auto replace_in = [replacement](std::string& token, std::string_view with) {
    std::string text;
    size_t at = 0;
    for (size_t found; (found = token.find(replacement, at)) != std::string::npos; at = found + replacement.size()) {
      text.append(token, at, found - at).append(with);
    }
    token = text.append(token, at);
  };
  const auto apply = [replace_in, drops_first](std::vector<std::string>& tokens) {
    for (size_t i = 0; i < tokens.size(); ++i) replace_in(tokens[i], i == 0 && drops_first ? "" : " ");
  };
  return {.apply = apply, .apply_to_inner_token = [replace_in](std::string& token) { replace_in(token, " "); }};
}

}  // namespace

Decoder::Decoder(const std::optional<JsonReader>& node) : present_(node.has_value()) {
  if (node) add(*node);
}

void Decoder::add(const JsonReader& node) {
  const std::string type = node.string("type");
  if (type == "ByteLevel") {
    steps_.push_back(byte_level_step());
  } else if (type == "Replace") {
    steps_.push_back(replace_step(TextPattern::from_json(node.at("pattern")), node.string("content")));
  } else if (type == "ByteFallback") {
    steps_.push_back(byte_fallback_step());
  } else if (type == "Fuse") {
    steps_.push_back(fuse_step());
  } else if (type == "Strip") {
    steps_.push_back(
        strip_step(character_of(node, "content"), node.at("start").as_unsigned(), node.at("stop").as_unsigned()));
  } else if (type == "Metaspace") {
    steps_.push_back(metaspace_step(character_of(node, "replacement"), prepend_scheme(node) != PrependScheme::kNever));
  } else if (type == "Sequence") {
    for (const auto& item : node.at("decoders").items()) add(item);
  } else {
    node.at("type").fail("a supported decoder: ByteLevel, Replace, ByteFallback, Fuse, Strip, Metaspace, Sequence");
  }
}

std::string Decoder::decode(std::vector<std::string> tokens) const {
  for (const auto& step : steps_) step.apply(tokens);
  std::string text;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (i > 0 && !present_) text += ' ';
    text += tokens[i];
  }
  return text;
}

// After a step with joins_tokens, the token is in the middle of one long text. A later step with trims_ends changes
// only the ends of this text, so it is skipped.
std::string Decoder::bytes_of(std::string token) const {
  bool fused = false;
  for (const auto& step : steps_) {
    if (fused && step.trims_ends) continue;
    fused = fused || step.joins_tokens;
    if (step.apply_to_inner_token) {
      step.apply_to_inner_token(token);
      continue;
    }
    std::vector<std::string> tokens = {std::move(token)};
    step.apply(tokens);
    token.clear();
    for (const auto& part : tokens) token += part;
  }
  return token;
}

}  // namespace tessera::text
