// Log-probs of tokens as OpenAI's two APIs have them: `logprobs` of completions and of chats.
//
//   TextOffsets offsets(tokenizer);                           // of one choice of a completion
//   Json lists = completion_log_probs(token, log_probs, offsets.place_of(token), tokenizer);
//
//   ContentEntries entries;                                   // of one choice of a chat
//   entries.add(token, log_probs, tokenizer);
//   Json list = entries.take("hel", tokenizer);               // those of the tokens that this content is made of
//   list = entries.finish(tokenizer);
//
// One thread at a time.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/base/text/json.h"
#include "tessera/models/generation/choice.h"
#include "tessera/text/tokenizer.h"

namespace tessera::serve {

// {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []} of one token. The token is in its
// top_logprobs even where it is none of the likeliest.
Json completion_log_probs(int64_t token, const TokenLogProbs& found, int64_t offset, const text::Tokenizer& tokenizer);
// The same lists for a prompt that is echoed as `text`. `found`: of its second token and all behind it; nothing is
// known of the first one.
Json prompt_log_probs(const std::vector<int64_t>& prompt, const std::string& text,
                      const std::vector<TokenLogProbs>& found, const text::Tokenizer& tokenizer);
// Puts each list of `more` behind the list of that key.
void append_lists(Json& lists, const Json& more);

// Places of tokens in the text of a choice, counted in characters.
class TextOffsets {
 public:
  explicit TextOffsets(text::Tokenizer tokenizer, bool skip_special_tokens = true)
      : decoder_(std::move(tokenizer), skip_special_tokens) {}
  // Where the text of the next token begins.
  int64_t place_of(int64_t token);
  // Text that stands before the next token and is of no token.
  void skip(std::string_view text);

 private:
  text::StreamDecoder decoder_;
  int64_t characters_ = 0;
};

// Entries of `logprobs.content` of a chat. Their bytes, joined, are the content: a token whose text is not in the
// content (an end token, a stop string, a tool call) has no entry, and the entry of a token that is there in part has
// that part.
class ContentEntries {
 public:
  void add(int64_t token, TokenLogProbs found, const text::Tokenizer& tokenizer);
  // The entries of all tokens that end in this piece of the content.
  Json take(std::string_view content, const text::Tokenizer& tokenizer);
  // The entry of a token whose end is not in the content, where there is one; the content has ended.
  Json finish(const text::Tokenizer& tokenizer);

 private:
  struct Waiting {
    std::string taken, left;  // bytes that are in the content, and those that may come
    TokenLogProbs found;
  };
  std::vector<Waiting> waiting_;
};

}  // namespace tessera::serve
