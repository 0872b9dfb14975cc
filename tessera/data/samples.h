// Records to token ids with a mask of what is learnt.
//
//   SampleMaker maker(tokenizer, chat_template);
//   Sample sample = maker.make(record);
//
// Text is learnt whole and ends with the tokenizer's EOS. Of prompt and completion, the completion and the EOS behind
// it are learnt; both are tokenized on their own, as they are when the model generates. Of a chat, what the assistant
// says is learnt, its end-of-turn token included: the {% generation %} blocks of the template where it has them, else
// what the template prints for the assistant's messages. An instruction with its output (Alpaca) is a chat of one turn
// where there is a template, else a prompt in Alpaca's own words with its completion. With `train_on_inputs` all of a
// sample is learnt. Thread-safe; borrows tokenizer and template.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/data/record.h"
#include "tessera/text/chat_template.h"
#include "tessera/text/tokenizer.h"

namespace tessera::data {

struct Sample {
  std::vector<int32_t> tokens;
  std::vector<uint8_t> learnt;  // 1: the model learns to predict this token
};

class SampleMaker {
 public:
  // vocab_size: tokens that the model knows; 0: any.
  SampleMaker(const text::Tokenizer& tokenizer, const std::optional<text::ChatTemplate>& chat_template,
              int64_t vocab_size = 0, bool train_on_inputs = false)
      : tokenizer_(tokenizer),
        chat_template_(chat_template),
        vocab_size_(vocab_size),
        train_on_inputs_(train_on_inputs) {}

  // Error kConfig for a chat without template, for a token that the model does not know and for preference pairs;
  // kFormat when the template refuses the messages, or when what it prints does not show where the assistant speaks.
  Sample make(const Record& record) const;

 private:
  // What the assistant says, as byte ranges of the rendered text: [first, last) is learnt, and behind it everything up
  // to the end-of-turn token, the first special one before `limit`.
  struct Turn {
    size_t first = 0, last = 0, limit = 0;
    bool to_last_special = false;  // a turn that holds special tokens of its own, as tool calls do
  };

  Sample make_unchecked(const Record& record) const;
  Sample from_text(const Record& record) const;
  Sample from_completion(const std::string& prompt, const std::string& completion) const;
  Sample from_instruction(const Record& record) const;
  Sample from_chat(const Record& record) const;
  std::vector<Turn> spoken_by_assistant(const Record& record, const nlohmann::ordered_json& extra,
                                        const std::string& text) const;
  void learn_turn(const Turn& turn, const text::Encoding& encoding, Sample& sample) const;

  const text::Tokenizer& tokenizer_;
  const std::optional<text::ChatTemplate>& chat_template_;
  int64_t vocab_size_;
  bool train_on_inputs_;
};

}  // namespace tessera::data
