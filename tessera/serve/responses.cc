#include "tessera/serve/responses.h"

#include <algorithm>
#include <ctime>
#include <nlohmann/json.hpp>
#include <random>
#include <utility>

namespace tessera::serve {
namespace {

// A random id for a tool call: nine letters and digits, the form that Mistral's templates require.
std::string call_id() {
  constexpr std::string_view kLetters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
  std::random_device random;
  std::string id(9, '0');
  for (char& each : id) each = kLetters[random() % kLetters.size()];
  return id;
}

}  // namespace

Response::Response(Endpoint endpoint, std::string id, const ServedModel& served, const CompletionRequest& request)
    : endpoint_(endpoint),
      id_(std::move(id)),
      served_(served),
      created_(std::time(nullptr)),
      prompt_tokens_(request.prompt_tokens),
      stream_(request.stream),
      log_probs_(request.log_probs.has_value()),
      usage_in_chunks_(request.stream_usage),
      no_new_tokens_(request.no_new_tokens),
      one_tool_call_(request.one_tool_call),
      choices_(request.choices.size()) {
  for (size_t i = 0; request.echo && i < choices_.size(); ++i) {
    choices_[i].echoed = request.choices[i].echoed;
    if (log_probs_) choices_[i].echoed_tokens = request.choices[i].prompt;
  }
  for (auto& choice : choices_) {
    if (log_probs_ && is_chat()) choice.log_probs = {{"content", Json::array()}};
    if (log_probs_ && !is_chat()) choice.offsets.emplace(served.tokenizer);
  }
  if (request.tools.empty()) return;
  for (auto& choice : choices_) choice.reader.emplace(request.tools);
}

// The log-probs to send with a piece, or null. `content` is the text of the piece without tool calls. For a chat an
// entry is sent with the content that holds its token's text, which may come in a later piece than the token; the last
// piece has all entries that were not sent yet.
Json Response::log_probs_of(Choice& choice, const AnswerPiece& piece, const std::string& content) {
  if (!log_probs_) return nullptr;
  const auto& tokenizer = served_.tokenizer;
  const bool has_token = piece.token && piece.log_probs;
  if (!is_chat()) {
    if (!has_token) return nullptr;
    return completion_log_probs(*piece.token, *piece.log_probs, choice.offsets->offset_of(*piece.token), tokenizer);
  }
  if (has_token) choice.entries.add(*piece.token, *piece.log_probs, tokenizer);
  auto entries = choice.entries.take(content, tokenizer);
  if (choice.finish) {
    for (auto& entry : choice.entries.finish(tokenizer)) entries.push_back(std::move(entry));
  }
  return entries.empty() ? Json() : Json({{"content", std::move(entries)}});
}

// Puts the echoed prompt in front of `text`, and its log-probs in front of `log_probs`, if `piece` is the first piece
// of the choice. With no_new_tokens_ the text and the log-probs of the generated token are dropped.
void Response::echo(Choice& choice, const AnswerPiece& piece, std::string& text, Json& log_probs) {
  if (no_new_tokens_) text.clear();
  const auto prompt_text = std::exchange(choice.echoed, {});
  text.insert(0, prompt_text);
  if (choice.echoed_tokens.empty()) return;
  auto whole =
      prompt_log_probs(std::exchange(choice.echoed_tokens, {}), prompt_text, piece.prompt_log_probs, served_.tokenizer);
  if (!no_new_tokens_ && !log_probs.is_null()) append_lists(whole, log_probs);
  log_probs = std::move(whole);
}

// Splits the text of `piece` (the part of the answer from one generated token) into tool calls and other text. Appends
// the tool calls to choice.calls and returns the other text.
std::string Response::read(Choice& choice, const AnswerPiece& piece) {
  if (!choice.reader) return piece.text;
  std::string text;
  const auto take = [&](ToolCallReader::ToolCallOutput read) {
    if (one_tool_call_ && choice.tool_call_count > 0) return;  // the answer has ended with its first call
    text += read.text;
    for (auto& call : read.calls) {
      if (one_tool_call_ && choice.tool_call_count > 0) return;
      Json json = {{"id", call_id()},
                   {"type", "function"},
                   {"function", {{"name", std::move(call.name)}, {"arguments", std::move(call.arguments)}}}};
      if (stream_) json["index"] = choice.tool_call_count;
      choice.calls.push_back(std::move(json));
      ++choice.tool_call_count;
    }
  };
  take(choice.reader->push(piece.text));
  if (piece.finish) take(choice.reader->finish());
  return text;
}

// The order matters: tool calls are taken out of the text first; log-probs are computed for the text that is left; only
// then the echoed prompt is put in front. Without a stream everything is collected in the choice for full_response().
std::optional<Json> Response::add(const AnswerPiece& piece) {
  auto& choice = choices_[piece.choice];
  if (choice.finish) return std::nullopt;
  if (piece.token && !no_new_tokens_) ++new_tokens_;
  const int64_t called_before = choice.tool_call_count;
  auto text = read(choice, piece);
  const bool has_called = choice.tool_call_count > called_before;
  choice.finish = no_new_tokens_ ? Finish::kLength : piece.finish;
  if (one_tool_call_ && has_called) choice.finish = Finish::kStop;
  if (!choice.echoed_tokens.empty() && choice.offsets) choice.offsets->skip(choice.echoed);
  auto log_probs = log_probs_of(choice, piece, text);
  if (has_called) choice.entries = {};  // tokens of the call have no entries
  echo(choice, piece, text, log_probs);
  if (!stream_) {
    choice.text += text;
    if (choice.log_probs.is_null()) {
      choice.log_probs = std::move(log_probs);
    } else if (!log_probs.is_null()) {
      append_lists(choice.log_probs, log_probs);
    }
    return std::nullopt;
  }
  if (text.empty() && choice.calls.empty() && log_probs.is_null() && !choice.finish) return std::nullopt;
  Json content = Json::object();
  if (is_chat()) {
    Json delta = Json::object();
    if (!text.empty()) delta["content"] = std::move(text);
    if (!choice.calls.empty()) delta["tool_calls"] = std::exchange(choice.calls, Json::array());
    content["delta"] = std::move(delta);
  } else {
    content["text"] = std::move(text);
  }
  return response_object(
      Json::array({choice_json(piece.choice, std::move(content), choice.finish, std::move(log_probs))}));
}

bool Response::done() const {
  return std::ranges::all_of(choices_, [](const Choice& choice) { return choice.finish.has_value(); });
}

Json Response::usage() const {
  return {{"prompt_tokens", prompt_tokens_},
          {"completion_tokens", new_tokens_},
          {"total_tokens", prompt_tokens_ + new_tokens_}};
}

Json Response::response_object(Json choices) const {
  const char* object = !is_chat() ? "text_completion" : stream_ ? "chat.completion.chunk" : "chat.completion";
  Json json = {
      {"id", id_}, {"object", object}, {"created", created_}, {"model", served_.name}, {"choices", std::move(choices)}};
  if (usage_in_chunks_) json["usage"] = nullptr;  // only the last chunk has a value
  return json;
}

// One element of "choices". `content` has its "text", "message" or "delta". finish_reason is null until the choice
// ends.
Json Response::choice_json(size_t index, Json content, const std::optional<Finish>& finish, Json log_probs) const {
  Json choice = {{"index", index}};
  choice.update(content);
  choice["logprobs"] = std::move(log_probs);
  choice["finish_reason"] = !finish                               ? Json()
                            : *finish == Finish::kLength          ? Json("length")
                            : choices_[index].tool_call_count > 0 ? Json("tool_calls")
                                                                  : Json("stop");
  return choice;
}

Json Response::full_response() const {
  Json choices = Json::array();
  for (size_t i = 0; i < choices_.size(); ++i) {
    const auto& choice = choices_[i];
    Json content = {{"text", choice.text}};
    if (is_chat()) {
      const bool calls_alone = choice.tool_call_count > 0 && choice.text.empty();
      Json message = {
          {"role", "assistant"}, {"content", calls_alone ? Json() : Json(choice.text)}, {"refusal", nullptr}};
      if (choice.tool_call_count > 0) message["tool_calls"] = choice.calls;
      content = {{"message", std::move(message)}};
    }
    choices.push_back(choice_json(i, std::move(content), choice.finish, choice.log_probs));
  }
  auto json = response_object(std::move(choices));
  json["usage"] = usage();
  return json;
}

std::vector<Json> Response::first_chunks() const {
  std::vector<Json> chunks;
  for (size_t i = 0; is_chat() && i < choices_.size(); ++i) {
    const Json content = {{"delta", {{"role", "assistant"}, {"content", ""}}}};
    chunks.push_back(response_object(Json::array({choice_json(i, content, std::nullopt, nullptr)})));
  }
  return chunks;
}

Json Response::usage_chunk() const {
  auto json = response_object(Json::array());
  json["usage"] = usage();
  return json;
}

}  // namespace tessera::serve
