#include "tessera/text/detail/decoder.h"

#include <charconv>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/text/detail/byte_level.h"
#include "tessera/text/detail/normalizer.h"
#include "tessera/text/detail/pre_tokenizer.h"
#include "tessera/text/detail/unicode.h"

namespace tessera::text {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD
constexpr size_t kMaxDecodedBytes = size_t{1} << 32;

class ByteLevelStep : public DecoderStep {
 public:
  void apply(std::vector<std::string>& tokens) const override {
    std::string bytes;
    for (const auto& token : tokens) {
      if (const auto spelled = bytes_of_token(token))
        bytes += *spelled;
      else
        bytes += token;
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
  void apply(std::vector<std::string>& tokens) const override {
    std::vector<std::string> result;
    std::string bytes;
    const auto flush = [&] {
      if (bytes.empty()) return;
      if (is_valid_utf8(bytes))
        result.push_back(bytes);
      else
        result.insert(result.end(), bytes.size(), std::string(kReplacement));
      bytes.clear();
    };
    for (auto& token : tokens) {
      unsigned value = 0;
      const bool shaped = token.size() == 6 && token.starts_with("<0x") && token[5] == '>';
      if (shaped && parse_hex(token, value)) {
        bytes += static_cast<char>(value);
        continue;
      }
      flush();
      result.push_back(std::move(token));
    }
    flush();
    tokens = std::move(result);
  }

 private:
  // Two hexadecimal digits, or '+' and one, as Rust's parser reads them.
  static bool parse_hex(const std::string& token, unsigned& value) {
    const char* begin = token.data() + (token[3] == '+' ? 4 : 3);
    const char* end = token.data() + 5;
    const auto [stop, error] = std::from_chars(begin, end, value, 16);
    return error == std::errc() && stop == end && *begin != '-';
  }
};

class FuseStep : public DecoderStep {
 public:
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
    for (size_t i = 0; i < tokens.size(); ++i) {
      const std::string_view with = i == 0 && drops_first_ ? "" : " ";
      std::string text;
      size_t at = 0;
      for (size_t found; (found = tokens[i].find(replacement_, at)) != std::string::npos;
           at = found + replacement_.size()) {
        text.append(tokens[i], at, found - at).append(with);
      }
      tokens[i] = text.append(tokens[i], at);
    }
  }

 private:
  std::string replacement_;
  bool drops_first_;
};

}  // namespace

Decoder Decoder::from_json(const JsonReader& node) {
  Decoder decoder;
  if (node.is_null()) return decoder;
  decoder.present_ = true;
  decoder.add(node);
  return decoder;
}

void Decoder::add(const JsonReader& node) {
  const std::string type = node.string("type");
  if (type == "ByteLevel")
    steps_.push_back(std::make_unique<ByteLevelStep>());
  else if (type == "Replace")
    steps_.push_back(std::make_unique<ReplaceStep>(TextPattern::from_json(node.at("pattern")), node.string("content")));
  else if (type == "ByteFallback")
    steps_.push_back(std::make_unique<ByteFallbackStep>());
  else if (type == "Fuse")
    steps_.push_back(std::make_unique<FuseStep>());
  else if (type == "Strip") {
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

}  // namespace tessera::text
