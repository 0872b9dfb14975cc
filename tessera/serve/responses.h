// Builds the JSON of an answer in the format of OpenAI's API, as a whole or as chunks of a stream.
//
//   Response response(Endpoint::kChat, "chatcmpl-1", served, request);
//   while (!response.done()) response.add(piece);    // in the order of the pieces
//   response.full_response()
//
// For a stream, send first_chunks(), the results of add(), and usage_chunk() instead of full_response().
// Not thread-safe.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/text/json.h"
#include "tessera/serve/requests.h"
#include "tessera/serve/scheduler.h"
#include "tessera/serve/token_entries.h"
#include "tessera/serve/tool_calls.h"

namespace tessera::serve {

class Response {
 public:
  Response(Endpoint endpoint, std::string id, const ServedModel& served, const CompletionRequest& request);

  // The first chunks of a stream: for a chat the role of each choice, for a completion none.
  std::vector<Json> first_chunks() const;
  // Adds a piece of the answer to its choice. A piece of a choice that is finished already is ignored. For a stream,
  // returns the chunk to send, or nullopt when there is nothing to send. Without a stream, returns nullopt.
  std::optional<Json> add(const AnswerPiece& piece);
  bool is_finished(size_t choice) const { return choices_[choice].finish.has_value(); }
  bool done() const;  // all choices are finished
  Json full_response() const;
  Json usage_chunk() const;

 private:
  struct Choice {
    std::optional<ToolCallReader> reader{};  // set when the prompt has tools
    std::string echoed{};                    // the text of the prompt, sent before the first piece
    std::vector<int64_t> echoed_tokens{};    // the tokens of the prompt, if their log-probs are sent with its text
    std::optional<TextOffsets> offsets{};    // for a completion with log-probs
    ContentEntries entries{};                // for a chat with log-probs
    std::string text{};                      // without stream: the text so far
    Json calls = Json::array();              // tool calls; for a stream only those that are not sent yet
    Json log_probs{};
    std::optional<Finish> finish{};
    int64_t tool_call_count = 0;  // number of tool calls so far
  };
  Json response_object(Json choices) const;
  Json choice_json(size_t index, Json content, const std::optional<Finish>& finish, Json log_probs) const;
  Json log_probs_of(Choice& choice, const AnswerPiece& piece, const std::string& content);
  void echo(Choice& choice, const AnswerPiece& piece, std::string& text, Json& log_probs);
  Json usage() const;
  bool is_chat() const { return endpoint_ == Endpoint::kChat; }
  std::string read(Choice& choice, const AnswerPiece& piece);

  Endpoint endpoint_;
  std::string id_;
  const ServedModel& served_;
  int64_t created_, prompt_tokens_, new_tokens_ = 0;
  bool stream_, log_probs_, usage_in_chunks_, no_new_tokens_, one_tool_call_;
  std::vector<Choice> choices_;
};

}  // namespace tessera::serve
