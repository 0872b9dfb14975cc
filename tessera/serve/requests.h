// Reads the bodies of OpenAI's completions and chat completions, and checks them against the limits.
//
//   const CompletionRequest request = read_request(body, Endpoint::kChat, served);
//
// No key is ignored silently. ApiError, with the name of the key, for an unknown key, for a key that would change the
// result and is not supported, and for a value out of range. ApiError also for a prompt longer than the context, and
// for a model other than the served one. Thread-safe.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/text/json.h"
#include "tessera/models/generation/generate.h"
#include "tessera/serve/answer_form.h"
#include "tessera/serve/limits.h"
#include "tessera/text/chat/chat_template.h"
#include "tessera/text/tokenizer.h"

namespace tessera::serve {

enum class Endpoint { kChat, kText };

// The served model: everything that is needed to read a request.
struct ServedModel {
  std::string name;
  std::string path{};  // the path or ORG/NAME from the command line, which clients may use as the model's name, too
  ModelConfig config;
  GenerationOptions defaults;  // from generation_config.json
  text::Tokenizer tokenizer;
  std::optional<text::ChatTemplate> chat;
  int64_t cache_tokens = 0;  // size of the KV cache in tokens
  Limits limits{};
  std::shared_ptr<AnswerForms> forms = std::make_shared<AnswerForms>();

  bool has_name(std::string_view model) const { return model == name || (!path.empty() && model == path); }
};

struct CompletionRequest {
  struct Choice {
    std::vector<int64_t> prompt{};
    GenerationOptions options{};
    std::string echoed{};  // with `echo`: the text of the prompt, which comes before the answer
  };
  std::vector<Choice> choices{};  // "n" choices of each prompt, in the order of their index in the answer
  int64_t prompt_tokens = 0;      // number of prompt tokens; a prompt counts once for all its choices
  std::vector<std::string> stop{};
  std::set<std::string> tools{};       // names of the functions in the prompt
  std::optional<int64_t> log_probs{};  // log-probs are requested, with this many of the likeliest tokens
  bool echo = false;                   // each answer begins with the prompt, and its log-probs with the prompt's
  bool no_new_tokens = false;          // only the prompt is returned; one token is generated and dropped
  bool stream = false, stream_usage = false;
  bool one_tool_call = false;  // an answer ends after its first tool call
};

// Reads and checks a request. `body` is the JSON text of the request. ApiError 400 for a wrong request, 404 for another
// model, 503 when the requests in progress leave no memory for the grammar that this request needs (AnswerForms::of).
CompletionRequest read_request(std::string_view body, Endpoint endpoint, const ServedModel& served);

}  // namespace tessera::serve
