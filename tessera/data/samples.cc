#include "tessera/data/samples.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/json.h"
#include "tessera/base/quote.h"

namespace tessera::data {

Sample SampleMaker::make(const Record& record) const {
  Sample sample = make_unchecked(record);
  if (train_on_inputs_) sample.learnt.assign(sample.tokens.size(), 1);
  if (vocab_size_ == 0) return sample;
  for (const int32_t token : sample.tokens) {
    TESSERA_CHECK(token < vocab_size_, ErrorKind::kConfig,
                  "[data.read] {}: the tokenizer makes token {} ({}) of it, "
                  "the model knows {} tokens. Do tokenizer and "
                  "model belong together?",
                  record.where, token, quote(tokenizer_.id_to_token(token)), vocab_size_);
  }
  return sample;
}

Sample SampleMaker::make_unchecked(const Record& record) const {
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
            "preference training (DPO) takes; this is "
            "training on what should be said. To train on the chosen answers "
            "name them as such with "
            "data.columns=[completion=chosen], or [messages=chosen] where they "
            "are whole conversations.",
            record.where);
    default:
      return from_text(record);
  }
}

// Special tokens stand at the two ends of a text, not where a stream is cut into parts.
Sample SampleMaker::from_text(const Record& record) const {
  Sample sample;
  sample.tokens = tokenizer_.encode(record.text, {.add_special_tokens = record.first});
  const auto eos = tokenizer_.eos_id();
  const bool ends = eos && !sample.tokens.empty() && sample.tokens.back() == *eos;
  if (eos && record.last && !ends) sample.tokens.push_back(*eos);
  if (!record.last && record.first && ends) sample.tokens.pop_back();
  sample.learnt.assign(sample.tokens.size(), 1);
  return sample;
}

Sample SampleMaker::from_completion(const std::string& prompt, const std::string& completion) const {
  Sample sample;
  sample.tokens = tokenizer_.encode(prompt);
  const auto eos = tokenizer_.eos_id();
  if (eos && !sample.tokens.empty() && sample.tokens.back() == *eos)
    sample.tokens.pop_back();  // one that the tokenizer adds
  sample.learnt.assign(sample.tokens.size(), 0);
  const auto answer = tokenizer_.encode(completion, {.add_special_tokens = false});
  sample.tokens.insert(sample.tokens.end(), answer.begin(), answer.end());
  if (eos && (sample.tokens.empty() || sample.tokens.back() != *eos)) sample.tokens.push_back(*eos);
  sample.learnt.resize(sample.tokens.size(), 1);
  return sample;
}

// Alpaca's prompt, word for word.
Sample SampleMaker::from_instruction(const Record& record) const {
  if (!chat_template_) {
    const char* request = record.input.empty() ? "Below is an instruction that describes a task. Write a response "
                                                 "that appropriately "
                                                 "completes the request.\n\n### Instruction:\n{}\n\n### "
                                                 "Response:\n"
                                               : "Below is an instruction that describes a task, paired with an "
                                                 "input that provides "
                                                 "further context. Write a response that appropriately completes "
                                                 "the request.\n\n"
                                                 "### Instruction:\n{}\n\n### Input:\n{}\n\n### Response:\n";
    return from_completion(fmt::format(fmt::runtime(request), record.text, record.input), record.completion);
  }
  const std::string request = record.input.empty() ? record.text : record.text + "\n\n" + record.input;
  Json chat = {{"messages",
                {{{"role", "user"}, {"content", request}}, {{"role", "assistant"}, {"content", record.completion}}}}};
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
bool is_silent(const Record& record, size_t message) {
  return message < record.silent.size() && record.silent[message] != 0;
}

// Which of the assistant's messages are learnt, in their order.
std::vector<bool> heard_turns(const Record& record) {
  std::vector<bool> heard;
  const Json& messages = record.json->at("messages");
  for (size_t i = 0; i < messages.size(); ++i) {
    if (is_assistant(messages[i])) heard.push_back(!is_silent(record, i));
  }
  return heard;
}

// The text around a message's content, found by putting another content in its place.
std::optional<std::pair<size_t, size_t>> content_between(const text::ChatTemplate& chat, const Json& messages,
                                                         size_t index, const Json& extra, const std::string& text) {
  static const std::string kMark = "\u2402assistant content\u2403";
  Json marked = messages;
  marked[index]["content"] = kMark;
  std::string other;
  try {
    other = chat.render(marked, false, extra).text;
  } catch (const Error&) {
    return std::nullopt;
  }
  const size_t at = other.find(kMark);
  if (at == std::string::npos || other.find(kMark, at + 1) != std::string::npos) return std::nullopt;
  const std::string_view before = std::string_view(other).substr(0, at),
                         behind = std::string_view(other).substr(at + kMark.size());
  if (before.size() + behind.size() > text.size() || !text.starts_with(before) || !text.ends_with(behind))
    return std::nullopt;
  return std::pair{before.size(), text.size() - behind.size()};
}

// Where the turn of a message begins and ends when the conversation up to it is a prefix of the whole.
std::optional<std::pair<size_t, size_t>> turn_between(const text::ChatTemplate& chat, const Json& messages,
                                                      size_t index, const Json& extra, const std::string& text) {
  Json before = Json::array();
  for (size_t i = 0; i < index; ++i) before.push_back(messages[i]);
  try {
    const std::string prompt = chat.render(before, true, extra).text;
    before.push_back(messages[index]);
    const std::string turn = chat.render(before, false, extra).text;
    if (turn.size() <= prompt.size() || !turn.starts_with(prompt) || !text.starts_with(turn)) return std::nullopt;
    return std::pair{prompt.size(), turn.size()};
  } catch (const Error&) {
    return std::nullopt;  // a template that refuses half a conversation
  }
}

}  // namespace

std::vector<SampleMaker::Turn> SampleMaker::spoken_by_assistant(const Record& record, const Json& extra,
                                                                const std::string& text) const {
  const Json& messages = record.json->at("messages");
  std::vector<Turn> turns;
  for (size_t i = 0; i < messages.size(); ++i) {
    if (!is_assistant(messages[i]) || is_silent(record, i)) continue;
    const auto content = content_between(*chat_template_, messages, i, extra, text);
    const auto turn = turn_between(*chat_template_, messages, i, extra, text);
    const bool calls = messages[i].contains("tool_calls") && !messages[i]["tool_calls"].empty();
    TESSERA_CHECK(turn || (content && !calls), ErrorKind::kFormat,
                  "[data.read] {}: message {} of the assistant cannot be told "
                  "from what {} prints around it. "
                  "Mark it with {{% generation %}} in the template.",
                  record.where, i, chat_template_->name());
    if (!turn) {  // only whitespace may stand before the end-of-turn token
      turns.push_back({content->first, content->second,
                       std::min(text.size(), text.find_first_not_of(" \n", content->second)) + 1, false});
    } else if (calls || !content || content->second < turn->first || content->second > turn->second) {
      turns.push_back({turn->first, turn->second, turn->second, true});
    } else {
      turns.push_back({turn->first, content->second, turn->second, false});
    }
  }
  return turns;
}

void SampleMaker::learn_turn(const Turn& turn, const text::Encoding& encoding, Sample& sample) const {
  const auto& offsets = encoding.offsets;
  const auto begin_of = [&](size_t byte) {
    return static_cast<size_t>(std::lower_bound(offsets.begin(), offsets.end(), byte,
                                                [](const auto& offset, size_t at) { return offset.first < at; }) -
                               offsets.begin());
  };
  const size_t first = begin_of(turn.first), limit = begin_of(turn.limit);
  size_t last = begin_of(turn.last);
  const auto special = [&](size_t token) { return tokenizer_.is_special(encoding.ids[token]); };
  if (turn.to_last_special) {
    size_t end = last;
    while (end > first && !special(end - 1)) --end;
    if (end > first) last = end;
  } else {
    size_t end = last;
    while (end < limit && !special(end)) ++end;
    if (end < limit) last = end + 1;
  }
  for (size_t token = first; token < last; ++token) sample.learnt[token] = 1;
}

Sample SampleMaker::from_chat(const Record& record) const {
  TESSERA_CHECK(chat_template_.has_value(), ErrorKind::kConfig,
                "[data.read] {}: the record is a chat, but the model's folder "
                "has no chat template. Use a model with one, or "
                "records with 'prompt' and 'completion'.",
                record.where);
  const Json& messages = record.json->at("messages");
  Json extra = Json::object();
  if (record.json->contains("tools")) extra["tools"] = record.json->at("tools");
  const text::RenderedChat rendered = render(*chat_template_, messages, extra, record.where);
  const auto encoding = tokenizer_.encode_with_offsets(rendered.text, {.add_special_tokens = false});
  Sample sample;
  sample.tokens = encoding.ids;
  sample.learnt.assign(sample.tokens.size(), 0);
  if (!chat_template_->marks_generation()) {
    for (const auto& turn : spoken_by_assistant(record, extra, rendered.text)) learn_turn(turn, encoding, sample);
    return sample;
  }
  const auto heard = heard_turns(record);
  const bool all = std::find(heard.begin(), heard.end(), false) == heard.end();
  TESSERA_CHECK(all || heard.size() == rendered.generation_spans.size(), ErrorKind::kFormat,
                "[data.read] {}: some of {} messages of the assistant are not "
                "learnt, but {} marks {} of them with "
                "{{% generation %}}.",
                record.where, heard.size(), chat_template_->name(), rendered.generation_spans.size());
  size_t token = 0;
  for (size_t turn = 0; turn < rendered.generation_spans.size(); ++turn) {
    const auto& [first, last] = rendered.generation_spans[turn];
    while (token < encoding.ids.size() && encoding.offsets[token].first < first) ++token;
    for (; token < encoding.ids.size() && encoding.offsets[token].first < last; ++token) {
      sample.learnt[token] = all || heard[turn];
    }
  }
  return sample;
}

}  // namespace tessera::data
