// Structured output: the grammar of an answer that must have the form of "response_format", be a tool call
// ("tool_choice"), or be one of the two.
//
//   AnswerForms forms;                                        // one per server; keeps the forms used last
//   auto masks = forms.of({.format = *top.find("response_format")}, tokenizer);
//   options.constraint = std::make_shared<text::TokenConstraint>(masks, options.stop_tokens);   // one per sequence
//
// A tool call is the JSON of its name and arguments. It is between <tool_call> tags if the chat template uses them;
// this is the format that tool_calls.h reads. Forms are built one at a time. One grammar takes at most 4 MiB
// (text/grammar/grammar.h). All forms together, kept or in use, take at most kMostBytes, plus a few MiB for each form
// in use. Thread-safe.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "tessera/base/text/json.h"
#include "tessera/text/grammar/grammar_memory.h"
#include "tessera/text/grammar/token_constraint.h"
#include "tessera/text/tokenizer.h"

namespace tessera::serve {

struct AnswerFormOptions {
  std::optional<JsonReader> format{};  // "response_format", if its type is not text
  std::optional<JsonReader> tools{};   // the tools that the answer may call
  std::string tool{};                  // the name of the tool that it must call; "": any of them
  bool tagged = false;                 // the call is between <tool_call> tags
};

class AnswerForms {
 public:
  static constexpr size_t kMostBytes = size_t{256} << 20;

  // The masks of the form; null when every text is allowed. Raises the errors of JsonSchema and Grammar; ApiError 400
  // for an unknown type, and 503 when the forms in use leave no memory for a large form.
  std::shared_ptr<text::GrammarMasks> of(const AnswerFormOptions& options, const text::Tokenizer& tokenizer);
  size_t bytes() const { return memory_->bytes(); }  // memory of all forms, kept or in use

 private:
  std::shared_ptr<text::GrammarMasks> find_kept_form(const std::string& key);  // the kept form with this key, or null

  void make_room();

  const std::shared_ptr<text::GrammarMemory> memory_ = std::make_shared<text::GrammarMemory>(kMostBytes);
  std::mutex mutex_;  // held while a form is built
  std::shared_ptr<const text::SortedVocabulary> vocabulary_;
  std::list<std::pair<std::string, std::shared_ptr<text::GrammarMasks>>> recent_forms_;  // kept forms, last used first
};

}  // namespace tessera::serve
