// The JSON of answers, whole and in pieces, as OpenAI's API has it.
//
//   Response response(Endpoint::kChat, "chatcmpl-1", served, request);
//   while (!response.done()) response.add(piece);    // each as it comes
//   response.whole()                                 // of a stream instead: first(), what add() gives, usage_chunk()
//
// One thread at a time.
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
  Response(Endpoint endpoint, std::string id, const Served& served, const CompletionRequest& request);

  // Of a stream of a chat: the role of each choice.
  std::vector<Json> first() const;
  // Counts a piece in; of a choice that is finished it is ignored. Of a stream: the chunk that it brings, if any.
  std::optional<Json> add(const Piece& piece);
  bool is_finished(size_t choice) const { return choices_[choice].finish.has_value(); }
  bool done() const;  // all choices are finished
  Json whole() const;
  Json usage_chunk() const;

 private:
  struct Choice {
    std::optional<ToolCallReader> reader{};  // where the model was told of tools
    std::string echoed{};                    // the prompt's text, with which the first piece begins
    std::vector<int64_t> echoed_tokens{};    // of which log-probs come with that text
    std::optional<TextOffsets> offsets{};    // of a completion with log-probs
    ContentEntries entries{};                // of a chat with log-probs
    std::string text{};                      // of no stream
    Json calls = Json::array();              // of a stream: those that are not sent yet
    Json log_probs{};
    std::optional<Finish> finish{};
    int64_t called = 0;
  };
  Json frame(Json choices) const;
  Json choice_json(size_t index, Json content, const std::optional<Finish>& finish, Json log_probs) const;
  Json log_probs_of(Choice& choice, const Piece& piece, const std::string& content);
  void echo(Choice& choice, const Piece& piece, std::string& text, Json& log_probs);
  Json usage() const;
  bool is_chat() const { return endpoint_ == Endpoint::kChat; }
  std::string read(Choice& choice, const Piece& piece);

  Endpoint endpoint_;
  std::string id_;
  const Served& served_;
  int64_t created_, prompt_tokens_, new_tokens_ = 0;
  bool stream_, log_probs_, usage_in_chunks_, no_new_tokens_, one_tool_call_;
  std::vector<Choice> choices_;
};

}  // namespace tessera::serve
