#include "tessera/data/records/samples.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/text/json.h"
#include "tessera/data/records/turns.h"
#include "tessera/text/chat/chat_messages.h"
#include "tessera/text/document.h"
#include "tessera/text/embedding_rows.h"

namespace tessera::data {

TokenizedSample SampleMaker::make(const TrainingRecord& record) const {
  TokenizedSample sample = make_unchecked(record);
  if (options_.train_on_inputs) sample.loss_mask.assign(sample.tokens.size(), 1);
  if (options_.vocab_size == 0) return sample;
  text::check_embedding_rows(tokenizer_, sample.tokens, options_.vocab_size, "[data.read] " + record.where);
  return sample;
}

TokenizedSample SampleMaker::make_unchecked(const TrainingRecord& record) const {
  switch (record.kind) {
    case RecordKind::kCompletion:
      return from_completion(record.text, record.completion);
    case RecordKind::kInstruction:
      return from_instruction(record);
    case RecordKind::kChat:
      return from_chat(record);
    case RecordKind::kTokens:
      return {record.tokens, std::vector<uint8_t>(record.tokens.size(), 1)};
    case RecordKind::kPreference:
      raise(ErrorKind::kConfig,
            "[data.read] {}: is a preference pair (chosen, rejected), which "
            "is for preference training (DPO); this run trains on the "
            "answers themselves. To train on the chosen answers, rename the "
            "column with "
            "data.columns=[completion=chosen], or [messages=chosen] where they "
            "are whole conversations.",
            record.where);
    default:
      return from_text(record);
  }
}

// BOS and EOS are added at the two ends of a text, but not where a stream is cut into parts.
TokenizedSample SampleMaker::from_text(const TrainingRecord& record) const {
  TokenizedSample sample;
  if (record.first) {
    auto document = text::encode_document(tokenizer_, record.text);
    if (document.begins_with_bos) spells_bos_ = true;
    sample.tokens = std::move(document.ids);
  } else {
    sample.tokens = tokenizer_.encode(record.text, {.add_special_tokens = false});
  }
  const auto eos = tokenizer_.eos_id();
  if (!eos && record.last) lacks_eos_ = true;
  const bool ends = eos && !sample.tokens.empty() && sample.tokens.back() == *eos;
  if (eos && record.last && !ends) sample.tokens.push_back(*eos);
  if (!record.last && record.first && ends) sample.tokens.pop_back();
  sample.loss_mask.assign(sample.tokens.size(), 1);
  return sample;
}

// Prompt and completion are tokenized separately, as at generation, where the prompt alone is tokenized. Only the
// completion and its EOS are trained on.
TokenizedSample SampleMaker::from_completion(const std::string& prompt, const std::string& completion) const {
  TokenizedSample sample;
  auto document = text::encode_document(tokenizer_, prompt);
  if (document.begins_with_bos) spells_bos_ = true;
  sample.tokens = std::move(document.ids);
  const auto eos = tokenizer_.eos_id();
  if (!eos) lacks_eos_ = true;
  if (eos && !sample.tokens.empty() && sample.tokens.back() == *eos) {
    sample.tokens.pop_back();  // the tokenizer added an EOS after the prompt
  }
  sample.loss_mask.assign(sample.tokens.size(), 0);
  auto answer = tokenizer_.encode(completion, {.add_special_tokens = false});
  const auto bos = tokenizer_.bos_id();
  if (bos && bos != eos && !sample.tokens.empty() && !answer.empty() && answer.front() == *bos) {
    spells_bos_ = true;  // a sample has no BOS in the middle
    answer.erase(answer.begin());
  }
  sample.tokens.insert(sample.tokens.end(), answer.begin(), answer.end());
  if (eos && (sample.tokens.empty() || sample.tokens.back() != *eos)) sample.tokens.push_back(*eos);
  sample.loss_mask.resize(sample.tokens.size(), 1);
  return sample;
}

namespace {

// Alpaca's prompt, word for word. A system message replaces its first sentences, and earlier turns become instructions
// with responses.
std::string alpaca_prompt(const TrainingRecord& record) {
  std::string start =
      record.input.empty()
          ? "Below is an instruction that describes a task. Write a response that appropriately completes the request."
          : "Below is an instruction that describes a task, paired with an input that provides further context. Write "
            "a response that appropriately completes the request.";
  std::string turns;
  const auto add_request = [&](const std::string& text) { turns += "### Instruction:\n" + text + "\n\n"; };
  const Json none = Json::array();
  for (const Json& message : record.json ? *record.json : none) {
    const auto& role = message.at("role").get_ref<const std::string&>();
    const auto& content = message.at("content").get_ref<const std::string&>();
    if (role == "system") start = content;
    if (role == "user") add_request(content);
    if (role == "assistant") turns += "### Response:\n" + content + "\n\n";
  }
  add_request(record.text);
  if (!record.input.empty()) turns += "### Input:\n" + record.input + "\n\n";
  return start + "\n\n" + turns + "### Response:\n";
}

}  // namespace

TokenizedSample SampleMaker::from_instruction(const TrainingRecord& record) const {
  if (!chat_template_) return from_completion(alpaca_prompt(record), record.completion);
  const std::string request = record.input.empty() ? record.text : record.text + "\n\n" + record.input;
  Json chat = {{"messages", record.json ? *record.json : Json::array()}};
  chat["messages"].push_back({{"role", "user"}, {"content", request}});
  chat["messages"].push_back({{"role", "assistant"}, {"content", record.completion}});
  return from_chat(
      {.kind = RecordKind::kChat, .json = std::make_shared<const Json>(std::move(chat)), .where = record.where});
}

namespace {

text::RenderedChat render(const text::ChatTemplate& chat, const Json& messages, const Json& extra,
                          const std::string& where) {
  try {
    return chat.render(messages, false, extra);
  } catch (const Error& error) {
    raise(error.kind(), "[data.read] {}: {}", where, error.what());
  }
}

bool is_assistant(const Json& message) { return message.at("role") == "assistant"; }
bool is_excluded_message(const TrainingRecord& record, size_t message) {
  return message < record.is_excluded.size() && record.is_excluded[message] != 0;
}

// For each assistant message, in order: whether the model is trained on it.
std::vector<bool> trained_turns(const TrainingRecord& record) {
  std::vector<bool> is_trained;
  const Json& messages = record.json->at("messages");
  for (size_t i = 0; i < messages.size(); ++i) {
    if (is_assistant(messages[i])) is_trained.push_back(!is_excluded_message(record, i));
  }
  return is_trained;
}

bool is_blank_token(const text::Encoding& encoding, std::string_view text, size_t token) {
  const auto [first, last] = encoding.offsets[token];
  return text.substr(first, last - first).find_first_not_of(" \t\n\r") == text.npos;
}

}  // namespace

bool SampleMaker::ends_turn(int32_t token) const {
  const auto& ends = options_.end_tokens;
  return token == tokenizer_.eos_id() || std::ranges::find(ends, token) != ends.end();
}

// Marks the tokens of one turn as trained on, including the token that ends the turn. A byte position of the turn is
// mapped to the first token that begins at or after it. Returns false if no token ends the turn.
bool SampleMaker::mark_turn(const AssistantTurn& turn, const std::string& text, const text::Encoding& encoding,
                            TokenizedSample& sample) const {
  const auto& offsets = encoding.offsets;
  const auto begin_of = [&](size_t byte) {
    return static_cast<size_t>(
        std::ranges::lower_bound(offsets, byte, {}, [](const auto& offset) { return offset.first; }) - offsets.begin());
  };
  const auto special = [&](size_t token) {
    return tokenizer_.is_special(encoding.ids[token]) || ends_turn(encoding.ids[token]);
  };
  const size_t first = begin_of(turn.first), limit = begin_of(turn.limit), text_end = begin_of(turn.text_end);
  size_t end = limit;  // index after the token that ends the turn
  if (turn.ends_in_special) {
    while (end > first && !special(end - 1)) --end;
  } else {
    end = text_end;
    while (end < limit && !special(end)) ++end;
    end = end < limit ? end + 1 : first;
  }
  bool found = end > first;
  if (!found) {  // the header of the next turn may end this one
    size_t next = turn.ends_in_special ? limit : text_end;
    while (next < encoding.ids.size() && is_blank_token(encoding, text, next)) ++next;
    found = next < encoding.ids.size() && ends_turn(encoding.ids[next]);
    end = found ? next + 1 : turn.ends_in_special ? limit : text_end;
  }
  for (size_t token = first; token < end; ++token) sample.loss_mask[token] = 1;
  return found;
}

// Adds the end token to a last turn that has none. `text_behind` is the text that the template prints after the last
// turn when another turn follows. If the first token of `text_behind` that is not white space ends a turn, the tokens
// up to this one are appended to the sample and marked as trained on. Otherwise only lacks_turn_end_ is set.
void SampleMaker::append_end(const std::string& text_behind, TokenizedSample& sample) const {
  const auto encoding = tokenizer_.encode_with_offsets(text_behind, {.add_special_tokens = false});
  size_t end = 0;
  while (end < encoding.ids.size() && is_blank_token(encoding, text_behind, end)) ++end;
  if (end == encoding.ids.size() || !ends_turn(encoding.ids[end])) {
    lacks_turn_end_ = true;
    return;
  }
  // The sample may have tokens, such as white space, behind the last token that is trained on. They belong to the last
  // turn, before its end token, so they are trained on, too.
  for (size_t token = sample.loss_mask.size(); token-- > 0 && sample.loss_mask[token] == 0;) {
    sample.loss_mask[token] = 1;
  }
  sample.tokens.insert(sample.tokens.end(), encoding.ids.begin(),
                       encoding.ids.begin() + static_cast<ptrdiff_t>(end) + 1);
  sample.loss_mask.resize(sample.tokens.size(), 1);
}

void SampleMaker::mark_turns(const TrainingRecord& record, const Json& messages, const Json& extra,
                             const std::string& text, const text::Encoding& encoding, TokenizedSample& sample) const {
  const TurnFinder turns(*chat_template_, messages, extra, text);
  for (size_t i = 0; i < messages.size(); ++i) {
    if (!is_assistant(messages[i]) || is_excluded_message(record, i)) continue;
    const auto found = turns.find(i);
    TESSERA_CHECK(!found.empty(), ErrorKind::kFormat,
                  "[data.read] {}: message {} of the assistant cannot be found "
                  "in the text that {} renders. "
                  "Mark it with {{% generation %}} in the template.",
                  record.where, i, chat_template_->name());
    if (turns.drops_calls(i)) drops_calls_ = true;
    bool ends = true;
    for (const AssistantTurn& turn : found) ends &= mark_turn(turn, text, encoding, sample);
    if (ends) continue;
    if (i + 1 < messages.size()) {
      lacks_turn_end_ = true;
    } else {
      append_end(turns.text_behind_last(), sample);
    }
  }
}

std::vector<std::string> SampleMaker::warnings() const {
  std::vector<std::string> warnings;
  if (spells_bos_) {
    warnings.push_back("a text or completion begins with the BOS token itself; the sample has one BOS, not two");
  }
  if (lacks_eos_) {
    warnings.push_back(
        "the tokenizer names no eos_token (tokenizer_config.json, special_tokens_map.json): texts and completions end "
        "without one, and the model does not learn to stop");
  }
  if (lacks_turn_end_) {
    warnings.push_back(
        fmt::format("{} prints no token behind a turn of the assistant that ends it (a special token, the tokenizer's "
                    "eos_token, or "
                    "an eos_token_id of config.json or generation_config.json): the model does not learn to stop there",
                    chat_template_->name()));
  }
  if (drops_calls_) {
    warnings.push_back(fmt::format("{} does not print tool calls of the assistant: the model is not trained on them",
                                   chat_template_->name()));
  }
  return warnings;
}

// The conversation is rendered and tokenized as a whole, so its tokens are those that the model sees in use. The turns
// are byte ranges of the rendered text; the offsets of the tokens map them to tokens.
TokenizedSample SampleMaker::from_chat(const TrainingRecord& record) const {
  TESSERA_CHECK(chat_template_.has_value(), ErrorKind::kConfig,
                "[data.read] {}: the record is a chat, but the model's folder "
                "has no chat template. Use a model with one, or "
                "records with 'prompt' and 'completion'.",
                record.where);
  const Json messages = text::adapt_messages(*chat_template_, record.json->at("messages"));
  Json extra = Json::object();
  if (record.json->contains("tools")) extra["tools"] = record.json->at("tools");
  const text::RenderedChat rendered = render(*chat_template_, messages, extra, record.where);
  const auto encoding = tokenizer_.encode_with_offsets(rendered.text, {.add_special_tokens = false});
  TokenizedSample sample;
  sample.tokens = encoding.ids;
  sample.loss_mask.assign(sample.tokens.size(), 0);
  if (!chat_template_->marks_generation()) {
    mark_turns(record, messages, extra, rendered.text, encoding, sample);
    return sample;
  }
  const auto is_trained = trained_turns(record);
  const bool all = std::ranges::find(is_trained, false) == is_trained.end();
  TESSERA_CHECK(all || is_trained.size() == rendered.generation_spans.size(), ErrorKind::kFormat,
                "[data.read] {}: some of {} messages of the assistant are "
                "excluded from training, but {} marks {} of them with "
                "{{% generation %}}.",
                record.where, is_trained.size(), chat_template_->name(), rendered.generation_spans.size());
  // rendered.generation_spans are byte ranges of the rendered text, in ascending order; a token belongs to the span in
  // which the token begins.
  size_t token = 0;
  for (size_t turn = 0; turn < rendered.generation_spans.size(); ++turn) {
    const auto& [first, last] = rendered.generation_spans[turn];
    while (token < encoding.ids.size() && encoding.offsets[token].first < first) ++token;
    for (; token < encoding.ids.size() && encoding.offsets[token].first < last; ++token) {
      sample.loss_mask[token] = all || is_trained[turn];
    }
  }
  return sample;
}

}  // namespace tessera::data
