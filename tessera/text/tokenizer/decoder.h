// The decoders of tokenizer.json: ByteLevel, Replace, ByteFallback, Fuse, Strip, Metaspace, Sequence.
//
//   Decoder decoder = Decoder::from_json(node);
//   std::string text = decoder.decode(tokens);      // token strings, in order
//
// Immutable, thread-safe.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/text/tokenizer/tokenizer_file.h"

namespace tessera::text {

class DecoderStep {
 public:
  virtual ~DecoderStep() = default;
  virtual void apply(std::vector<std::string>& tokens) const = 0;
  // The bytes of one token that stands inside a text, which may be part of a character.
  virtual void apply_inside(std::string& token) const;
  // Makes one of all tokens; what a later step does at the ends of one it does at those of the text.
  virtual bool fuses() const { return false; }
  // Changes the ends of tokens alone.
  virtual bool trims() const { return false; }
};

class Decoder {
 public:
  static Decoder from_json(const JsonReader& node);
  // Without a decoder in the file, tokens are joined by spaces.
  std::string decode(std::vector<std::string> tokens) const;
  // What a token adds inside a text, in bytes.
  std::string bytes_of(std::string token) const;

 private:
  void add(const JsonReader& node);
  std::vector<std::unique_ptr<DecoderStep>> steps_;
  bool present_ = false;
};

}  // namespace tessera::text
