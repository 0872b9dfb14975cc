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

class ByteLevelStep : public DecoderStep {
 public:
  bool fuses() const override { return true; }
  void apply_inside(std::string& token) const override {
    if (auto spelled = bytes_of_token(token)) token = std::move(*spelled);
  }
  void apply(std::vector<std::string>& tokens) const override {
    std::string bytes;
    for (const auto& token : tokens) {
      if (const auto spelled = bytes_of_token(token)) {
        bytes += *spelled;
      } else {
        bytes += token;
      }
    }
    std::string text;
    append_lossy(bytes, text);
    tokens.assign(1, std::move(text));
  }
};

class ReplaceStep : public DecoderStep {
 public:
  ReplaceStep(TextPattern pattern, std::string content) : pattern_(std::move(pattern)), content_(std::move(content)) {}
  void apply(std::vector<std::string>& tokens) const override {
    RegexScratch scratch;
    std::vector<Span> matches;
    size_t total = 0;
    for (auto& token : tokens) {
      matches.clear();
      pattern_.find_all(token, scratch, matches);
      total += token.size() + matches.size() * content_.size();  // before it is made
      TESSERA_CHECK(total <= kMaxDecodedBytes, ErrorKind::kFormat,
                    "[text.decode] the decoder's Replace makes more than {} bytes", kMaxDecodedBytes);
      if (!matches.empty()) token = replaced(token, matches);
    }
  }

 private:
  std::string replaced(const std::string& token, const std::vector<Span>& matches) const {
    std::string text;
    size_t at = 0;
    for (const Span match : matches) {
      text.append(token, at, match.begin - at).append(content_);
      at = match.end;
    }
    return text.append(token, at);
  }

  TextPattern pattern_;
  std::string content_;
};

class ByteFallbackStep : public DecoderStep {
 public:
  void apply_inside(std::string& token) const override {
    if (const auto byte = byte_of(token)) token.assign(1, *byte);
  }
  void apply(std::vector<std::string>& tokens) const override {
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
      if (const auto byte = byte_of(token)) {
        bytes += *byte;
        continue;
      }
      flush();
      result.push_back(std::move(token));
    }
    flush();
    tokens = std::move(result);
  }

 private:
  // Of <0xHH>: two hexadecimal digits, or '+' and one, as Rust's parser reads them.
  static std::optional<char> byte_of(const std::string& token) {
    if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return std::nullopt;
    unsigned value = 0;
    const char* begin = token.data() + (token[3] == '+' ? 4 : 3);
    const char* end = token.data() + 5;
    const auto [stop, error] = std::from_chars(begin, end, value, 16);
    if (error != std::errc() || stop != end || *begin == '-') return std::nullopt;
    return static_cast<char>(value);
  }
};

class FuseStep : public DecoderStep {
 public:
  bool fuses() const override { return true; }
  void apply(std::vector<std::string>& tokens) const override {
    std::string text;
    for (const auto& token : tokens) text += token;
    tokens.assign(1, std::move(text));
  }
};

class StripStep : public DecoderStep {
 public:
  StripStep(uint32_t content, uint64_t start, uint64_t stop) : start_(start), stop_(stop) {
    append_utf8(content, content_);
  }
  bool trims() const override { return true; }
  void apply(std::vector<std::string>& tokens) const override {
    for (auto& token : tokens) {
      std::string_view rest = token;
      for (uint64_t i = 0; i < start_ && rest.starts_with(content_); ++i) rest.remove_prefix(content_.size());
      for (uint64_t i = 0; i < stop_ && rest.ends_with(content_); ++i) rest.remove_suffix(content_.size());
      if (rest.size() != token.size()) token = std::string(rest);
    }
  }

 private:
  std::string content_;
  uint64_t start_, stop_;
};

class MetaspaceStep : public DecoderStep {
 public:
  MetaspaceStep(uint32_t replacement, bool drops_first) : drops_first_(drops_first) {
    append_utf8(replacement, replacement_);
  }
  void apply(std::vector<std::string>& tokens) const override {
    for (size_t i = 0; i < tokens.size(); ++i) replace(tokens[i], i == 0 && drops_first_ ? "" : " ");
  }
  void apply_inside(std::string& token) const override { replace(token, " "); }

 private:
  void replace(std::string& token, std::string_view with) const {
    std::string text;
    size_t at = 0;
    for (size_t found; (found = token.find(replacement_, at)) != std::string::npos; at = found + replacement_.size()) {
      text.append(token, at, found - at).append(with);
    }
    token = text.append(token, at);
  }

  std::string replacement_;
  bool drops_first_;
};

}  // namespace

void DecoderStep::apply_inside(std::string& token) const {
  std::vector<std::string> tokens = {std::move(token)};
  apply(tokens);
  token.clear();
  for (const auto& part : tokens) token += part;
}

Decoder Decoder::from_json(const JsonReader& node) {
  Decoder decoder;
  if (node.is_null()) return decoder;
  decoder.present_ = true;
  decoder.add(node);
  return decoder;
}

void Decoder::add(const JsonReader& node) {
  const std::string type = node.string("type");
  if (type == "ByteLevel") {
    steps_.push_back(std::make_unique<ByteLevelStep>());
  } else if (type == "Replace") {
    steps_.push_back(std::make_unique<ReplaceStep>(TextPattern::from_json(node.at("pattern")), node.string("content")));
  } else if (type == "ByteFallback") {
    steps_.push_back(std::make_unique<ByteFallbackStep>());
  } else if (type == "Fuse") {
    steps_.push_back(std::make_unique<FuseStep>());
  } else if (type == "Strip") {
    steps_.push_back(std::make_unique<StripStep>(character_of(node, "content"), node.at("start").as_unsigned(),
                                                 node.at("stop").as_unsigned()));
  } else if (type == "Metaspace") {
    steps_.push_back(std::make_unique<MetaspaceStep>(character_of(node, "replacement"),
                                                     prepend_scheme(node) != PrependScheme::kNever));
  } else if (type == "Sequence") {
    for (const auto& item : node.at("decoders").items()) add(item);
  } else {
    node.at("type").fail("a supported decoder: ByteLevel, Replace, ByteFallback, Fuse, Strip, Metaspace, Sequence");
  }
}

std::string Decoder::decode(std::vector<std::string> tokens) const {
  for (const auto& step : steps_) step->apply(tokens);
  std::string text;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (i > 0 && !present_) text += ' ';
    text += tokens[i];
  }
  return text;
}

std::string Decoder::bytes_of(std::string token) const {
  bool fused = false;
  for (const auto& step : steps_) {
    if (!(fused && step->trims())) step->apply_inside(token);
    fused = fused || step->fuses();
  }
  return token;
}

}  // namespace tessera::text
