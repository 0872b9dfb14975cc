#include "tessera/serve/responses.h"

#include <fmt/format.h>

#include <algorithm>
#include <ctime>
#include <nlohmann/json.hpp>
#include <random>
#include <utility>

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

Json likeliest_of(const Served& served, const TokenLogProbs& found) {
  Json top = Json::object();
  for (const auto& [token, log_prob] : found.likeliest) top[text_of(token_bytes(served, token))] = written(log_prob);
  return top;
}

// More of each list.
void append(Json& lists, const Json& more) {
  for (auto& [key, values] : lists.items()) {
    for (const auto& value : more.at(key)) values.push_back(value);
  }
}

// Nine letters and digits, which Mistral's templates want.
std::string call_id() {
  constexpr std::string_view kLetters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
  std::random_device random;
  std::string id(9, '0');
  for (char& each : id) each = kLetters[random() % kLetters.size()];
  return id;
}

}  // namespace

Response::Response(Endpoint endpoint, std::string id, const Served& served, const CompletionRequest& request)
    : endpoint_(endpoint),
      id_(std::move(id)),
      served_(served),
      created_(std::time(nullptr)),
      prompt_tokens_(request.prompt_tokens),
      stream_(request.stream),
      log_probs_(request.log_probs.has_value()),
      usage_in_chunks_(request.stream_usage),
      no_new_tokens_(request.no_new_tokens),
      choices_(request.choices.size()) {
  for (size_t i = 0; request.echo && i < choices_.size(); ++i) {
    choices_[i].echoed = request.choices[i].echoed;
    if (log_probs_) choices_[i].echoed_tokens = request.choices[i].prompt;
  }
  if (request.tools.empty()) return;
  for (auto& choice : choices_) choice.reader.emplace(request.tools);
}

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
  return {{"tokens", Json::array({text_of(token_bytes(served_, piece.token))})},
          {"token_logprobs", Json::array({written(found.chosen)})},
          {"top_logprobs", Json::array({likeliest_of(served_, found)})}};
}

// Puts what was asked before what came of it. Of the prompt's first token nothing is known.
void Response::echo(Choice& choice, const Piece& piece, std::string& text, Json& log_probs) {
  if (no_new_tokens_) text.clear();
  text.insert(0, std::exchange(choice.echoed, {}));
  if (choice.echoed_tokens.empty()) return;
  Json tokens = Json::array(), chosen = Json::array({nullptr}), top = Json::array({nullptr});
  for (const auto token : std::exchange(choice.echoed_tokens, {}))
    tokens.push_back(text_of(token_bytes(served_, token)));
  for (const auto& found : piece.prompt_log_probs) {
    chosen.push_back(written(found.chosen));
    top.push_back(likeliest_of(served_, found));
  }
  Json whole = {{"tokens", std::move(tokens)}, {"token_logprobs", std::move(chosen)}, {"top_logprobs", std::move(top)}};
  if (!no_new_tokens_) append(whole, log_probs);
  log_probs = std::move(whole);
}

// The text that a piece brings, beside the tool calls.
std::string Response::read(Choice& choice, const Piece& piece) {
  if (!choice.reader) return piece.text;
  std::string text;
  const auto take = [&](ToolCallReader::Read read) {
    text += read.text;
    for (auto& call : read.calls) {
      Json json = {{"id", call_id()},
                   {"type", "function"},
                   {"function", {{"name", std::move(call.name)}, {"arguments", std::move(call.arguments)}}}};
      if (stream_) json["index"] = choice.called;
      choice.calls.push_back(std::move(json));
      ++choice.called;
    }
  };
  take(choice.reader->push(piece.text));
  if (piece.finish) take(choice.reader->finish());
  return text;
}

std::optional<Json> Response::add(const Piece& piece) {
  auto& choice = choices_[piece.choice];
  if (!no_new_tokens_) ++new_tokens_;
  auto text = read(choice, piece);
  choice.finish = no_new_tokens_ ? Finish::kLength : piece.finish;
  auto log_probs = log_probs_of(piece);
  echo(choice, piece, text, log_probs);
  if (!stream_) {
    choice.text += text;
    if (choice.log_probs.is_null()) {
      choice.log_probs = std::move(log_probs);
    } else if (!log_probs.is_null()) {
      append(choice.log_probs, log_probs);
    }
    return std::nullopt;
  }
  if (text.empty() && choice.calls.empty() && log_probs.is_null() && !piece.finish) return std::nullopt;
  Json content = Json::object();
  if (is_chat()) {
    Json delta = Json::object();
    if (!text.empty()) delta["content"] = std::move(text);
    if (!choice.calls.empty()) delta["tool_calls"] = std::exchange(choice.calls, Json::array());
    content["delta"] = std::move(delta);
  } else {
    content["text"] = std::move(text);
  }
  auto json = frame(Json::array({choice_json(piece.choice, std::move(content), choice.finish, std::move(log_probs))}));
  if (usage_in_chunks_) json["usage"] = nullptr;
  return json;
}

bool Response::done() const {
  return std::all_of(choices_.begin(), choices_.end(), [](const Choice& choice) { return choice.finish.has_value(); });
}

Json Response::usage() const {
  return {{"prompt_tokens", prompt_tokens_},
          {"completion_tokens", new_tokens_},
          {"total_tokens", prompt_tokens_ + new_tokens_}};
}

Json Response::frame(Json choices) const {
  const char* object = !is_chat() ? "text_completion" : stream_ ? "chat.completion.chunk" : "chat.completion";
  return {
      {"id", id_}, {"object", object}, {"created", created_}, {"model", served_.name}, {"choices", std::move(choices)}};
}

Json Response::choice_json(size_t index, Json content, const std::optional<Finish>& finish, Json log_probs) const {
  Json choice = {{"index", index}};
  choice.update(content);
  choice["logprobs"] = std::move(log_probs);
  choice["finish_reason"] = !finish                      ? Json()
                            : *finish == Finish::kLength ? Json("length")
                            : choices_[index].called > 0 ? Json("tool_calls")
                                                         : Json("stop");
  return choice;
}

Json Response::whole() const {
  Json choices = Json::array();
  for (size_t i = 0; i < choices_.size(); ++i) {
    const auto& choice = choices_[i];
    Json content = {{"text", choice.text}};
    if (is_chat()) {
      const bool calls_alone = choice.called > 0 && choice.text.empty();
      Json message = {
          {"role", "assistant"}, {"content", calls_alone ? Json() : Json(choice.text)}, {"refusal", nullptr}};
      if (choice.called > 0) message["tool_calls"] = choice.calls;
      content = {{"message", std::move(message)}};
    }
    choices.push_back(choice_json(i, std::move(content), choice.finish, choice.log_probs));
  }
  auto json = frame(std::move(choices));
  json["usage"] = usage();
  return json;
}

std::vector<Json> Response::first() const {
  std::vector<Json> chunks;
  for (size_t i = 0; is_chat() && i < choices_.size(); ++i) {
    const Json content = {{"delta", {{"role", "assistant"}, {"content", ""}}}};
    chunks.push_back(frame(Json::array({choice_json(i, content, std::nullopt, nullptr)})));
  }
  return chunks;
}

Json Response::usage_chunk() const {
  auto json = frame(Json::array());
  json["usage"] = usage();
  return json;
}

}  // namespace tessera::serve
