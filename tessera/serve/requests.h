// The bodies of OpenAI's completions and chat completions, read within limits.
//
//   const CompletionRequest request = read_request(body, Endpoint::kChat, served);
//
// Every key is known: one that changes the result and is not supported is an ApiError that names it, as are values out
// of range, a prompt beyond the context and another model than the one that is served. Thread-safe.
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

// The model that answers, as requests need to know it.
struct Served {
  std::string name;
  std::string path{};  // as the user gave it, ORG/NAME or a path, by which clients may call the model as well
  ModelConfig config;
  GenerationOptions defaults;  // what generation_config.json says
  text::Tokenizer tokenizer;
  std::optional<text::ChatTemplate> chat;
  int64_t cache_tokens = 0;
  Limits limits{};
  std::shared_ptr<AnswerForms> forms = std::make_shared<AnswerForms>();

  bool is_called(std::string_view model) const { return model == name || (!path.empty() && model == path); }
};

struct CompletionRequest {
  struct Choice {
    std::vector<int64_t> prompt{};
    GenerationOptions options{};
    std::string echoed{};  // the prompt's text, where it stands before the answer's
  };
  std::vector<Choice> choices{};  // by their index: of each prompt as many as "n" says
  int64_t prompt_tokens = 0;      // each prompt once
  std::vector<std::string> stop{};
  std::set<std::string> tools{};       // functions that the model was told of
  std::optional<int64_t> log_probs{};  // wanted, with so many of the likeliest
  bool echo = false;                   // answers begin with their prompt, and log-probs with its tokens'
  bool no_new_tokens = false;          // the prompt alone; one token is made that nobody sees
  bool stream = false, stream_usage = false;
  bool one_tool_call = false;  // an answer ends with its first call
};

CompletionRequest read_request(std::string_view body, Endpoint endpoint, const Served& served);

}  // namespace tessera::serve
