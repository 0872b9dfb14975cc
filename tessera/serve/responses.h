// The JSON of answers, whole and in pieces, as OpenAI's API has it.
//
//   Response response(Endpoint::kChat, "chatcmpl-1", served);
//   response.add(piece);                       // each as it comes
//   response.whole()                           // or, streaming: first(), chunk(piece), usage()
//
// One thread at a time.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "tessera/base/json.h"
#include "tessera/serve/requests.h"
#include "tessera/serve/scheduler.h"

namespace tessera::serve {

class Response {
 public:
  Response(Endpoint endpoint, std::string id, const Served& served, const CompletionRequest& request);

  // Counts a piece in; with `whole` its text is kept, too.
  void add(const Piece& piece, bool whole);
  Json whole() const;
  // Chunks of a stream; the first of a chat brings the role alone.
  std::optional<Json> first() const;
  Json chunk(const Piece& piece) const;
  Json usage_chunk() const;

 private:
  Json frame(const char* object, Json choices) const;
  Json choice(Json content, const std::optional<Finish>& finish, Json log_probs) const;
  Json log_probs_of(const Piece& piece) const;
  Json usage() const;
  bool is_chat() const { return endpoint_ == Endpoint::kChat; }

  Endpoint endpoint_;
  std::string id_;
  const Served& served_;
  int64_t created_, prompt_tokens_, new_tokens_ = 0;
  bool log_probs_, usage_in_chunks_;
  std::string text_;
  Json all_log_probs_;
  std::optional<Finish> finish_;
};

}  // namespace tessera::serve
