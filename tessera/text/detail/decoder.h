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

#include "tessera/text/detail/tokenizer_file.h"

namespace tessera::text {

class DecoderStep {
 public:
  virtual ~DecoderStep() = default;
  virtual void apply(std::vector<std::string>& tokens) const = 0;
};

class Decoder {
 public:
  static Decoder from_json(const JsonReader& node);
  // Without a decoder in the file, tokens are joined by spaces.
  std::string decode(std::vector<std::string> tokens) const;

 private:
  void add(const JsonReader& node);
  std::vector<std::unique_ptr<DecoderStep>> steps_;
  bool present_ = false;
};

}  // namespace tessera::text
