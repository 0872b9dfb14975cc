#include "tessera/serve/responses.h"

#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <nlohmann/json.hpp>

#include "tessera/base/utf8.h"

namespace tessera::serve {
namespace {

std::string token_bytes(const Served& served, int64_t token) {
  return served.tokenizer.token_bytes(static_cast<text::TokenId>(token));
}

// Text, or "bytes:\xe2\x80" for a token that ends or begins inside a character, as OpenAI has it.
std::string text_of(const std::string& bytes) {
  if (is_valid_utf8(bytes)) return bytes;
  std::string text = "bytes:";
  for (const char each : bytes) text += fmt::format("\\x{:02x}", static_cast<unsigned char>(each));
  return text;
}

// JSON has no infinity; a token that cannot come has OpenAI's -9999.
double written(double log_prob) { return std::max(log_prob, -9999.0); }

Json token_entry(const Served& served, int64_t token, double log_prob) {
  const auto raw = token_bytes(served, token);
  Json bytes = Json::array();
  for (const char each : raw) bytes.push_back(static_cast<unsigned char>(each));
  return {{"token", text_of(raw)}, {"logprob", written(log_prob)}, {"bytes", std::move(bytes)}};
}

}  // namespace

Response::Response(Endpoint endpoint, std::string id, const Served& served, const CompletionRequest& request)
    : endpoint_(endpoint),
      id_(std::move(id)),
      served_(served),
      created_(std::time(nullptr)),
      prompt_tokens_(static_cast<int64_t>(request.prompt.size())),
      log_probs_(request.log_probs.has_value()),
      usage_in_chunks_(request.stream_usage) {}

Json Response::log_probs_of(const Piece& piece) const {
  if (!log_probs_ || !piece.log_probs) return nullptr;
  const auto& found = *piece.log_probs;
  if (is_chat()) {
    auto entry = token_entry(served_, piece.token, found.chosen);
    entry["top_logprobs"] = Json::array();
    for (const auto& [token, log_prob] : found.likeliest) {
      entry["top_logprobs"].push_back(token_entry(served_, token, log_prob));
    }
    return {{"content", Json::array({entry})}};
  }
  Json top = Json::object();
  for (const auto& [token, log_prob] : found.likeliest) {
    top[text_of(token_bytes(served_, token))] = written(log_prob);
  }
  return {{"tokens", Json::array({text_of(token_bytes(served_, piece.token))})},
          {"token_logprobs", Json::array({written(found.chosen)})},
          {"top_logprobs", Json::array({top})}};
}

void Response::add(const Piece& piece, bool whole) {
  ++new_tokens_;
  finish_ = piece.finish;
  if (!whole) return;
  text_ += piece.text;
  const auto log_probs = log_probs_of(piece);
  if (all_log_probs_.is_null()) {
    all_log_probs_ = log_probs;
  } else if (!log_probs.is_null()) {
    for (auto& [key, values] : all_log_probs_.items()) values.push_back(log_probs[key][0]);
  }
}

Json Response::usage() const {
  return {{"prompt_tokens", prompt_tokens_},
          {"completion_tokens", new_tokens_},
          {"total_tokens", prompt_tokens_ + new_tokens_}};
}

Json Response::frame(const char* object, Json choices) const {
  return {
      {"id", id_}, {"object", object}, {"created", created_}, {"model", served_.name}, {"choices", std::move(choices)}};
}

Json Response::choice(Json content, const std::optional<Finish>& finish, Json log_probs) const {
  Json choice = {{"index", 0}};
  choice.update(content);
  choice["logprobs"] = std::move(log_probs);
  choice["finish_reason"] = !finish ? Json() : Json(*finish == Finish::kLength ? "length" : "stop");
  return choice;
}

Json Response::whole() const {
  const Json content = is_chat()
                           ? Json({{"message", {{"role", "assistant"}, {"content", text_}, {"refusal", nullptr}}}})
                           : Json({{"text", text_}});
  auto json =
      frame(is_chat() ? "chat.completion" : "text_completion", Json::array({choice(content, finish_, all_log_probs_)}));
  json["usage"] = usage();
  return json;
}

std::optional<Json> Response::first() const {
  if (!is_chat()) return std::nullopt;
  const Json content = {{"delta", {{"role", "assistant"}, {"content", ""}}}};
  return frame("chat.completion.chunk", Json::array({choice(content, std::nullopt, nullptr)}));
}

Json Response::chunk(const Piece& piece) const {
  Json delta = Json::object();
  if (!piece.text.empty()) delta["content"] = piece.text;
  const Json content = is_chat() ? Json({{"delta", delta}}) : Json({{"text", piece.text}});
  auto json = frame(is_chat() ? "chat.completion.chunk" : "text_completion",
                    Json::array({choice(content, piece.finish, log_probs_of(piece))}));
  if (usage_in_chunks_) json["usage"] = nullptr;
  return json;
}

Json Response::usage_chunk() const {
  auto json = frame(is_chat() ? "chat.completion.chunk" : "text_completion", Json::array());
  json["usage"] = usage();
  return json;
}

}  // namespace tessera::serve
