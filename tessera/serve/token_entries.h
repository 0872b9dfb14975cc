// The log-probs of tokens in the formats of OpenAI's two APIs: `logprobs` of completions and of chats.
//
//   TextOffsets offsets(tokenizer);                           // one per choice of a completion
//   Json lists = completion_log_probs(token, log_probs, offsets.offset_of(token), tokenizer);
//
//   ContentEntries entries;                                   // one per choice of a chat
//   entries.add(token, log_probs, tokenizer);
//   Json list = entries.take("hel", tokenizer);               // the entries of the tokens that end in this content
//   list = entries.finish(tokenizer);
//
// Not thread-safe.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/base/text/json.h"
#include "tessera/models/generation/sampling.h"
#include "tessera/text/tokenizer.h"

namespace tessera::serve {

// Returns {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []} with one token. Its top_logprobs
// always contain the token itself, even if it is not one of the likeliest.
Json completion_log_probs(int64_t token, const TokenLogProbs& log_probs, int64_t offset,
                          const text::Tokenizer& tokenizer);
// The lists of completion_log_probs() for all tokens of a prompt that is echoed as `text`. `log_probs` has the
// log-probs of all tokens except the first; the first token has no log-prob, and the lists have null for it.
Json prompt_log_probs(const std::vector<int64_t>& prompt, const std::string& text,
                      const std::vector<TokenLogProbs>& log_probs, const text::Tokenizer& tokenizer);
// Appends each list of `more` to the list with the same key in `lists`.
void append_lists(Json& lists, const Json& more);

// Computes the positions of tokens in the text of a choice, counted in characters.
class TextOffsets {
 public:
  explicit TextOffsets(text::Tokenizer tokenizer, bool skip_special_tokens = true)
      : decoder_(std::move(tokenizer), skip_special_tokens) {}
  // Takes `token`, the next token of the choice. Returns the position of its text in the choice's text.
  int64_t offset_of(int64_t token);
  // Adds text that comes before the next token and belongs to no token.
  void skip(std::string_view text);

 private:
  text::StreamDecoder decoder_;
  int64_t characters_ = 0;
};

// Builds the entries of `logprobs.content` of a chat. The bytes of all entries, joined, are the content: a token whose
// text is not in the content (an end token, a stop string, a tool call) has no entry, and a token of which the content
// has only a part has an entry with this part.
class ContentEntries {
 public:
  void add(int64_t token, TokenLogProbs log_probs, const text::Tokenizer& tokenizer);
  // `content`: the next piece of the answer's text. Returns one entry for each token whose last byte is in this piece.
  Json take(std::string_view content, const text::Tokenizer& tokenizer);
  // Must be called after the last take(). If the content ends inside the bytes of a token, returns the entry of this
  // token with the bytes that are in the content; otherwise returns an empty array.
  Json finish(const text::Tokenizer& tokenizer);

 private:
  struct PendingToken {
    std::string matched_bytes, left;  // bytes already found in the content, and bytes that may still come
    TokenLogProbs log_probs;
  };
  std::vector<PendingToken> waiting_;
};

}  // namespace tessera::serve
