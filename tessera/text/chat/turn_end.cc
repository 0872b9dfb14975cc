#include "tessera/text/chat/turn_end.h"

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "tessera/base/text/json.h"

namespace tessera::text {
namespace {

constexpr const char* kAnswer = "\u2402answer of the assistant\u2403";
constexpr const char* kNextQuestion = "\u2402next question of the user\u2403";

Json message(const char* role, const char* content, bool in_parts) {
  if (!in_parts) return {{"role", role}, {"content", content}};
  return {{"role", role}, {"content", Json::array({{{"type", "text"}, {"text", content}}})}};
}

// Templates for tool use only (Hermes 3) refuse a chat without a list of tools, so an empty list is tried, too.
std::optional<std::string> rendered(const ChatTemplate& chat, const Json& messages) {
  for (const Json& extra : {Json::object(), Json{{"tools", Json::array()}}}) {
    if (auto text = chat.try_render(messages, /*add_generation_prompt=*/false, extra)) return text;
  }
  return std::nullopt;
}

bool is_blank(std::string_view text) { return text.find_first_not_of(" \t\r\n") == text.npos; }

// The first special or added token of the text. Blank tokens do not count: some vocabularies have runs of spaces and
// newlines as added tokens.
std::optional<TokenId> first_control_token(std::string_view text, const Tokenizer& tokenizer) {
  for (const TokenId id : tokenizer.encode(text, {.add_special_tokens = false})) {
    if (tokenizer.is_special(id) || (tokenizer.is_added(id) && !is_blank(tokenizer.id_to_token(id)))) return id;
  }
  return std::nullopt;
}

// Renders a chat of one question and one answer, and searches the text after the answer. If this text has no control
// token, a second question is added, and the text between the answer and this question is searched.
std::optional<TokenId> turn_end_token(const ChatTemplate& chat, const Tokenizer& tokenizer, bool in_parts) {
  Json messages = {message("user", "question", in_parts), message("assistant", kAnswer, in_parts)};
  const auto ended = rendered(chat, messages);
  if (!ended) return std::nullopt;
  const size_t answer = ended->rfind(kAnswer);
  if (answer == std::string::npos) return std::nullopt;
  const std::string_view behind = std::string_view(*ended).substr(answer + std::string_view(kAnswer).size());
  if (const auto token = first_control_token(behind, tokenizer)) return token;
  messages.push_back(message("user", kNextQuestion, in_parts));
  const auto continued = rendered(chat, messages);
  if (!continued) return std::nullopt;
  const size_t first = continued->rfind(kAnswer), next = continued->rfind(kNextQuestion);
  if (first == std::string::npos || next == std::string::npos || next < first) return std::nullopt;
  const size_t begin = first + std::string_view(kAnswer).size();
  return first_control_token(std::string_view(*continued).substr(begin, next - begin), tokenizer);
}

}  // namespace

std::optional<TokenId> turn_end_token(const ChatTemplate& chat, const Tokenizer& tokenizer) {
  if (const auto token = turn_end_token(chat, tokenizer, /*in_parts=*/false)) return token;
  return turn_end_token(chat, tokenizer, /*in_parts=*/true);
}

}  // namespace tessera::text
