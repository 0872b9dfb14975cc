// The form that an answer must have: that of "response_format", a call of a tool ("tool_choice"), or either.
//
//   AnswerForms forms;                                        // a server's, which keeps the last ones
//   auto masks = forms.of({.format = *top.find("response_format")}, tokenizer);
//   options.constraint = std::make_shared<text::TokenConstraint>(masks, options.stop_tokens);   // of each sequence
//
// A call is the JSON of its name and arguments, between <tool_call> tags where the model was taught those: what
// tool_calls.h reads. Forms are made one at a time, each of at most 4 MiB (text/grammar/grammar.h), and all of them
// together, those that are kept and those that are in use, take kMostBytes at most, with room of a few MiB for each
// that is in use. Thread-safe.
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

struct WantedForm {
  std::optional<JsonReader> format{};  // "response_format", of another type than text
  std::optional<JsonReader> tools{};   // of which one may be called
  std::string tool{};                  // the one, by its name; "": any of them
  bool tagged = false;                 // calls stand between tags
};

class AnswerForms {
 public:
  static constexpr size_t kMostBytes = size_t{256} << 20;

  // Null where any text will do. Errors of JsonSchema and of Grammar; ApiError for types that are not known, and 503
  // where the forms in use leave no memory for a large one.
  std::shared_ptr<text::GrammarMasks> of(const WantedForm& wanted, const text::Tokenizer& tokenizer);
  size_t bytes() const { return memory_->bytes(); }  // of all forms, kept or in use

 private:
  std::shared_ptr<text::GrammarMasks> known(const std::string& key);

  void make_room();

  const std::shared_ptr<text::GrammarMemory> memory_ = std::make_shared<text::GrammarMemory>(kMostBytes);
  std::mutex mutex_;  // held while a form is made
  std::shared_ptr<const text::SortedVocabulary> vocabulary_;
  std::list<std::pair<std::string, std::shared_ptr<text::GrammarMasks>>> last_;  // the last one used first
};

}  // namespace tessera::serve
