// The text of a generation while its tokens arrive, up to the first stop string or stop token.
//
//   TextStream stream(tokenizer, {"\n\n", "User:"}, options.stop_tokens);
//   for (const int64_t token : tokens) {
//     out += stream.push(token);
//     if (stream.stopped()) break;
//   }
//   out += stream.finish();
//
// A token that ends the generation adds no text, even when its vocabulary does not mark it as special. push() returns
// only complete UTF-8 characters. Text that may be the beginning of a stop string is held back until later tokens
// decide whether it is one. The stop string itself is never returned, even when it spans several tokens. The text ends
// before the stop string that occurs first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "tessera/text/tokenizer.h"

namespace tessera {

// Finds stop strings in text that arrives in pieces.
class StopStrings {
 public:
  // Empty stop strings are ignored.
  explicit StopStrings(std::vector<std::string> stops);
  // Adds a piece of text. Returns all text that cannot be part of a stop string and was not returned before.
  std::string push(std::string_view piece);
  // Returns the text that was held back, unless a stop string was found.
  std::string finish();
  bool stopped() const { return stopped_; }

 private:
  std::vector<std::string> stops_;
  std::string pending_text_;
  bool stopped_ = false;
};

class TextStream {
 public:
  TextStream(text::Tokenizer tokenizer, std::vector<std::string> stops, std::vector<int64_t> stop_tokens)
      : decoder_(std::move(tokenizer)), stops_(std::move(stops)), stop_tokens_(std::move(stop_tokens)) {}
  std::string push(int64_t token) {
    const bool ends = std::ranges::find(stop_tokens_, token) != stop_tokens_.end();
    return ends ? std::string() : stops_.push(decoder_.push(static_cast<text::TokenId>(token)));
  }
  std::string finish() {
    auto rest = stops_.push(decoder_.finish());
    return rest + stops_.finish();
  }
  bool stopped() const { return stops_.stopped(); }

 private:
  text::StreamDecoder decoder_;
  StopStrings stops_;
  std::vector<int64_t> stop_tokens_;
};

}  // namespace tessera
