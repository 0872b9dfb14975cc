// The text of a generation as its tokens come, up to the first stop string or stop token.
//
//   TextStream stream(tokenizer, {"\n\n", "User:"}, options.stop_tokens);
//   for (const int64_t token : tokens) {
//     out += stream.push(token);
//     if (stream.stopped()) break;
//   }
//   out += stream.finish();
//
// A token that ends the generation is no text, also where its vocabulary does not call it special. Text comes in whole
// characters. What may be the beginning of a stop string is held back until it is clear; the stop
// string itself never comes, wherever tokens cut it. The earliest counts, of those that begin together the shortest.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "tessera/text/tokenizer.h"

namespace tessera {

// Finds stop strings in text that comes in pieces.
class StopStrings {
 public:
  // Empty ones never stop.
  explicit StopStrings(std::vector<std::string> stops);
  // What is certain of all text so far and was not given before.
  std::string push(std::string_view piece);
  // The rest, where none came.
  std::string finish();
  bool stopped() const { return stopped_; }

 private:
  std::vector<std::string> stops_;
  std::string held_;
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
