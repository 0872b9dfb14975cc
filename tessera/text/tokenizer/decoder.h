// The decoders of tokenizer.json: ByteLevel, Replace, ByteFallback, Fuse, Strip, Metaspace, Sequence.
//
//   Decoder decoder(file.root().find("decoder"));
//   std::string text = decoder.decode(tokens);      // token strings, in order
//
// Immutable, thread-safe.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tessera/text/tokenizer/tokenizer_file.h"

namespace tessera::text {

struct DecoderStep {
  std::function<void(std::vector<std::string>& tokens)> apply;
  // Converts one token in the middle of a text to its bytes, which may be only a part of a character. When this
  // function is not set, Decoder::bytes_of calls apply() with this token alone.
  std::function<void(std::string& token)> apply_to_inner_token{};
  // True when the step joins all tokens into one text. A later step with `trims_ends` then changes only the ends of
  // this text, not the ends of each token.
  bool joins_tokens = false;
  bool trims_ends = false;  // the step changes only the ends of each token
};

class Decoder {
 public:
  explicit Decoder(const std::optional<JsonReader>& node);
  // When the file has no decoder, tokens are joined with spaces.
  std::string decode(std::vector<std::string> tokens) const;
  // The bytes that a token adds in the middle of a text.
  std::string bytes_of(std::string token) const;

 private:
  void add(const JsonReader& node);
  std::vector<DecoderStep> steps_;
  bool present_;
};

}  // namespace tessera::text
