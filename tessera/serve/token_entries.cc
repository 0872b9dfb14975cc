#include "tessera/serve/token_entries.h"

#include <fmt/format.h>

#include <algorithm>

#include "tessera/base/text/utf8.h"

namespace tessera::serve {
namespace {

std::string bytes_of(const text::Tokenizer& tokenizer, int64_t token) {
  return tokenizer.token_bytes(static_cast<text::TokenId>(token));
}

// The token as text, or as "bytes:\xe2\x80" when it begins or ends inside a character, as in OpenAI's API.
std::string shown_token(const std::string& bytes) {
  if (is_valid_utf8(bytes)) return bytes;
  std::string text = "bytes:";
  for (const char each : bytes) text += fmt::format("\\x{:02x}", static_cast<unsigned char>(each));
  return text;
}

// JSON has no infinity. Like OpenAI's API, an impossible token has the log-prob -9999.
double finite_log_prob(double log_prob) { return std::max(log_prob, -9999.0); }

Json entry_of(const std::string& token_bytes, double log_prob) {
  Json bytes = Json::array();
  for (const char each : token_bytes) bytes.push_back(static_cast<unsigned char>(each));
  return {{"token", shown_token(token_bytes)}, {"logprob", finite_log_prob(log_prob)}, {"bytes", std::move(bytes)}};
}

Json top_log_probs(int64_t token, const TokenLogProbs& log_probs, const text::Tokenizer& tokenizer) {
  Json top = Json::object();
  for (const auto& [likely, log_prob] : log_probs.top_tokens) {
    top[shown_token(bytes_of(tokenizer, likely))] = finite_log_prob(log_prob);
  }
  top[shown_token(bytes_of(tokenizer, token))] = finite_log_prob(log_probs.chosen);
  return top;
}

int64_t count_characters(std::string_view text) {
  return std::ranges::count_if(text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

// The number of characters of the special tokens at the start of `prompt` that the tokenizer has added: `text`, the
// text of the prompt, does not contain them.
int64_t added_characters(const std::vector<int64_t>& prompt, const std::string& text,
                         const text::Tokenizer& tokenizer) {
  int64_t characters = 0;
  for (const int64_t token : prompt) {
    const auto bytes = bytes_of(tokenizer, token);
    if (!tokenizer.is_special(static_cast<text::TokenId>(token)) || text.starts_with(bytes)) break;
    characters += count_characters(bytes);
  }
  return characters;
}

}  // namespace

Json completion_log_probs(int64_t token, const TokenLogProbs& log_probs, int64_t offset,
                          const text::Tokenizer& tokenizer) {
  return {{"tokens", Json::array({shown_token(bytes_of(tokenizer, token))})},
          {"token_logprobs", Json::array({finite_log_prob(log_probs.chosen)})},
          {"top_logprobs", Json::array({top_log_probs(token, log_probs, tokenizer)})},
          {"text_offset", Json::array({offset})}};
}

Json prompt_log_probs(const std::vector<int64_t>& prompt, const std::string& text,
                      const std::vector<TokenLogProbs>& log_probs, const text::Tokenizer& tokenizer) {
  Json tokens = Json::array(), chosen = Json::array(), top = Json::array(), offsets = Json::array();
  TextOffsets places(tokenizer, /*skip_special_tokens=*/false);
  const int64_t added = added_characters(prompt, text, tokenizer), end = count_characters(text);
  for (size_t i = 0; i < prompt.size(); ++i) {
    tokens.push_back(shown_token(bytes_of(tokenizer, prompt[i])));
    offsets.push_back(std::clamp<int64_t>(places.offset_of(prompt[i]) - added, 0, end));
    const bool is_known = i > 0 && i <= log_probs.size();
    chosen.push_back(is_known ? Json(finite_log_prob(log_probs[i - 1].chosen)) : Json());
    top.push_back(is_known ? top_log_probs(prompt[i], log_probs[i - 1], tokenizer) : Json());
  }
  return {{"tokens", std::move(tokens)},
          {"token_logprobs", std::move(chosen)},
          {"top_logprobs", std::move(top)},
          {"text_offset", std::move(offsets)}};
}

void append_lists(Json& lists, const Json& more) {
  for (auto& [key, values] : lists.items()) {
    for (const auto& value : more.at(key)) values.push_back(value);
  }
}

int64_t TextOffsets::offset_of(int64_t token) {
  const int64_t place = characters_;
  characters_ += count_characters(decoder_.push(static_cast<text::TokenId>(token)));
  return place;
}

void TextOffsets::skip(std::string_view text) { characters_ += count_characters(text); }

void ContentEntries::add(int64_t token, TokenLogProbs log_probs, const text::Tokenizer& tokenizer) {
  if (tokenizer.is_special(static_cast<text::TokenId>(token))) return;  // special tokens have no text
  waiting_.push_back({.matched_bytes = "", .left = bytes_of(tokenizer, token), .log_probs = std::move(log_probs)});
}

// waiting_ has the tokens of the answer whose entries were not returned yet. The content consists of the bytes of these
// tokens in their order, without the bytes of tool calls and trimmed whitespace. Therefore `content`, the next piece of
// the content, is looked up in the joined PendingToken::left of these tokens, the bytes that may still come. The first
// match is used, and the bytes before the match are dropped, because no later piece can contain them.
Json ContentEntries::take(std::string_view content, const text::Tokenizer& tokenizer) {
  Json entries = Json::array();
  if (content.empty()) return entries;
  const auto release = [&](const PendingToken& token) {
    if (token.matched_bytes.empty()) return;
    auto entry = entry_of(token.matched_bytes, token.log_probs.chosen);
    entry["top_logprobs"] = Json::array();
    for (const auto& [likely, log_prob] : token.log_probs.top_tokens) {
      entry["top_logprobs"].push_back(entry_of(bytes_of(tokenizer, likely), log_prob));
    }
    entries.push_back(std::move(entry));
  };
  std::string bytes;
  for (const auto& token : waiting_) bytes += token.left;
  const auto place = bytes.find(content);
  // `bytes` are the bytes of the tokens in waiting_ that no earlier call has matched or dropped. The content has U+FFFD
  // in place of bytes that are not UTF-8, so `bytes` may not contain `content`. Then all of `bytes` are taken as the
  // bytes of `content`.
  size_t skipped = place == bytes.npos ? 0 : place, needed = place == bytes.npos ? bytes.size() : content.size();
  size_t released = 0;
  for (auto& token : waiting_) {
    const size_t skip = std::min(skipped, token.left.size());
    token.left.erase(0, skip);
    skipped -= skip;
    const size_t part = std::min(needed, token.left.size());
    token.matched_bytes += token.left.substr(0, part);
    token.left.erase(0, part);
    needed -= part;
    if (!token.left.empty()) break;
    release(token);
    ++released;
  }
  waiting_.erase(waiting_.begin(), waiting_.begin() + static_cast<std::ptrdiff_t>(released));
  return entries;
}

Json ContentEntries::finish(const text::Tokenizer& tokenizer) {
  std::erase_if(waiting_, [](const PendingToken& token) { return token.matched_bytes.empty(); });
  if (waiting_.empty()) return Json::array();
  auto& last = waiting_.front();
  last.left = std::exchange(last.matched_bytes, "");
  const auto content = last.left;
  auto entries = take(content, tokenizer);
  waiting_.clear();
  return entries;
}

}  // namespace tessera::serve
