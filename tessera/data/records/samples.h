// Records to token ids with a mask of what is learnt.
//
//   SampleMaker maker(tokenizer, chat_template);
//   Sample sample = maker.make(record);
//
// Text is learnt whole and ends with the tokenizer's EOS. Of prompt and completion, the completion and the EOS behind
// it are learnt; both are tokenized on their own, as they are when the model generates. A text that spells the BOS that
// the tokenizer adds has it once. Of a chat, the assistant's turns are learnt, from behind the header to the token that
// ends the turn: the {% generation %} blocks of the template where it has them, else what turns.h finds. A turn that
// the header of the next one ends (GLM's <|user|>) is learnt with that token. An instruction with its output (Alpaca)
// is a chat of one turn where there is a template, else a prompt in Alpaca's own words with its completion. With
// `train_on_inputs` all of a sample is learnt. Thread-safe; borrows tokenizer and template.
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

struct Sample {
  std::vector<int32_t> tokens;
  std::vector<uint8_t> learnt;  // 1: the model learns to predict this token
};

struct Turn;

struct SampleOptions {
  int64_t vocab_size = 0;                // tokens that the model knows; 0: any
  bool train_on_inputs = false;          // true: all of a sample is learnt
  std::vector<int32_t> end_tokens = {};  // that end a generation, beside the tokenizer's EOS
};

class SampleMaker {
 public:
  SampleMaker(const text::Tokenizer& tokenizer, const std::optional<text::ChatTemplate>& chat_template,
              SampleOptions options = {})
      : tokenizer_(tokenizer), chat_template_(chat_template), options_(std::move(options)) {}

  // Error kConfig for a chat without template, for a token that the model does not know and for preference pairs;
  // kFormat when the template refuses the messages, or when what it prints does not show where the assistant speaks.
  Sample make(const Record& record) const;

  // What is odd in the samples so far and changes what a model learns, one sentence each.
  std::vector<std::string> warnings() const;

 private:
  Sample make_unchecked(const Record& record) const;
  Sample from_text(const Record& record) const;
  Sample from_completion(const std::string& prompt, const std::string& completion) const;
  Sample from_instruction(const Record& record) const;
  Sample from_chat(const Record& record) const;
  void learn_turns(const Record& record, const nlohmann::ordered_json& messages, const nlohmann::ordered_json& extra,
                   const std::string& text, const text::Encoding& encoding, Sample& sample) const;
  // True when the turn's end is learnt, too.
  bool learn_turn(const Turn& turn, const std::string& text, const text::Encoding& encoding, Sample& sample) const;
  void append_end(const std::string& text_behind, Sample& sample) const;
  bool ends_turn(int32_t token) const;

  const text::Tokenizer& tokenizer_;
  const std::optional<text::ChatTemplate>& chat_template_;
  const SampleOptions options_;
  mutable std::atomic<bool> spells_bos_{false}, lacks_eos_{false}, lacks_turn_end_{false}, drops_calls_{false};
};

}  // namespace tessera::data
