#include "tessera/cli/verbs.h"

#include <array>

namespace tessera::cli {

std::span<const Verb> verbs() {
  static constexpr std::array kVerbs{
      Verb{"train", "Models", "Train, fine-tune or resume the run of a recipe", &run_train},
      Verb{"generate", "Models", "Continue a prompt, or chat", &run_generate},
      Verb{"serve", "Models", "Serve completions and chats over HTTP with OpenAI's API", &run_serve},
      Verb{"score", "Models", "Log-probs and perplexity of texts, completions and choices", &run_score},
      Verb{"report", "Models", "Write an HTML page about one run, or to compare several", &run_report},
      Verb{"ckpt", "Checkpoints and text", "List, verify and convert models and checkpoints", &run_ckpt},
      Verb{"tokenize", "Checkpoints and text", "Convert text on stdin to token ids on stdout, and back", &run_tokenize},
      Verb{"launch", "Clusters", "Start and supervise the ranks of any program", &run_launch},
      Verb{"trace", "Clusters", "Explain the flight records of a run that hung or failed", &run_trace},
      Verb{"doctor", "Clusters", "Show versions, threads, devices, back-ends and chosen kernels", &run_doctor},
  };
  return kVerbs;
}

const Verb* find_verb(std::string_view name) {
  for (const auto& verb : verbs()) {
    if (verb.name == name) return &verb;
  }
  return nullptr;
}

}  // namespace tessera::cli
