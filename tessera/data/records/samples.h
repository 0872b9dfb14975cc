// Converts records to token ids and a mask of the tokens that are trained on (have a label).
//
//   SampleMaker maker(tokenizer, chat_template);
//   TokenizedSample sample = maker.make(record);
//
// - Text: all of it is trained on. It ends with the tokenizer's EOS.
// - Prompt and completion: the completion and the EOS after it are trained on. The two are tokenized separately, as the
//   model sees them when it generates.
// - A text that begins with the tokenizer's BOS gets no second BOS.
// - Chat: the assistant's turns are trained on, from after the header to the token that ends the turn. They are the
//   template's {% generation %} blocks; without such blocks turns.h finds them. If the header of the next turn ends a
//   turn (GLM's <|user|>), that token is included.
// - Instruction and output (Alpaca): a chat of one turn if there is a template, else a prompt in Alpaca's own words
//   with its completion.
// With `train_on_inputs` all tokens are trained on. Thread-safe. Tokenizer and template must outlive the SampleMaker.
#pragma once

#include <atomic>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/data/records/record.h"
#include "tessera/text/chat/chat_template.h"
#include "tessera/text/tokenizer.h"

namespace tessera::data {

struct TokenizedSample {
  std::vector<int32_t> tokens;
  std::vector<uint8_t> loss_mask;  // 1: the token has a label, so the model is trained to predict it
};

struct AssistantTurn;

struct SampleOptions {
  int64_t vocab_size = 0;                // size of the model's vocabulary; 0: not checked
  bool train_on_inputs = false;          // true: all tokens of a sample are trained on
  std::vector<int32_t> end_tokens = {};  // tokens that end a generation, in addition to the tokenizer's EOS
};

class SampleMaker {
 public:
  SampleMaker(const text::Tokenizer& tokenizer, const std::optional<text::ChatTemplate>& chat_template,
              SampleOptions options = {})
      : tokenizer_(tokenizer), chat_template_(chat_template), options_(std::move(options)) {}

  // Converts a record to tokens with a loss mask. Errors: kConfig for a chat without a template, a token outside the
  // vocabulary, and a preference pair; kFormat when the template rejects the messages, or when the assistant's turns
  // cannot be found in the rendered text.
  TokenizedSample make(const TrainingRecord& record) const;

  // Warnings about the samples made so far, one sentence each: properties that affect what a model learns, such as a
  // missing EOS.
  std::vector<std::string> warnings() const;

 private:
  TokenizedSample make_unchecked(const TrainingRecord& record) const;
  TokenizedSample from_text(const TrainingRecord& record) const;
  TokenizedSample from_completion(const std::string& prompt, const std::string& completion) const;
  TokenizedSample from_instruction(const TrainingRecord& record) const;
  TokenizedSample from_chat(const TrainingRecord& record) const;
  void mark_turns(const TrainingRecord& record, const nlohmann::ordered_json& messages,
                  const nlohmann::ordered_json& extra, const std::string& text, const text::Encoding& encoding,
                  TokenizedSample& sample) const;
  // Marks the tokens of `turn`, including the token that ends the turn, as trained on in `sample`. Returns false if no
  // token of `encoding` ends the turn.
  bool mark_turn(const AssistantTurn& turn, const std::string& text, const text::Encoding& encoding,
                 TokenizedSample& sample) const;
  void append_end(const std::string& text_behind, TokenizedSample& sample) const;
  bool ends_turn(int32_t token) const;

  const text::Tokenizer& tokenizer_;
  const std::optional<text::ChatTemplate>& chat_template_;
  const SampleOptions options_;
  mutable std::atomic<bool> spells_bos_{false}, lacks_eos_{false}, lacks_turn_end_{false}, drops_calls_{false};
};

}  // namespace tessera::data
