// The decoders of tokenizer.json: ByteLevel, Replace, ByteFallback, Fuse, Strip, Metaspace, Sequence.
//
//   Decoder decoder(node);
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
  // The bytes of one token that stands inside a text, which may be part of a character; where it is not set they are
  // what apply() makes of the token alone.
  std::function<void(std::string& token)> apply_inside{};
  // Makes one of all tokens; what a later step does at the ends of one it does at those of the text.
  bool fuses = false;
  bool trims = false;  // changes the ends of tokens alone
};

class Decoder {
 public:
  explicit Decoder(const std::optional<JsonReader>& node);
  // Without a decoder in the file, tokens are joined by spaces.
  std::string decode(std::vector<std::string> tokens) const;
  // What a token adds inside a text, in bytes.
  std::string bytes_of(std::string token) const;

 private:
  void add(const JsonReader& node);
  std::vector<DecoderStep> steps_;
  bool present_;
};

}  // namespace tessera::text
