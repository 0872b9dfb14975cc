#include "tessera/cli/score/score_records.h"

#include <charconv>

#include "tessera/base/error.h"
#include "tessera/base/text/json.h"
#include "tessera/base/text/quote.h"
#include "tessera/text/document.h"
#include "tessera/text/embedding_rows.h"

namespace tessera::cli {
namespace {

constexpr JsonLimits kRecordLimits{
    .max_bytes = size_t{1} << 30, .max_depth = 64, .max_keys = 1'000'000, .exact_numbers = true};
constexpr int64_t kMostChoices = 10'000;

// One line of the input.
struct RecordLine {
  std::string_view text;
  const std::string& name;
  size_t number;

  std::string at(size_t column) const { return fmt::format("[score] {}:{}:{}", name, number, column); }
  // The position of a key, found by a text search; column 1 if the search fails (a key with escapes).
  std::string at_key(const std::string& key) const {
    const size_t found = text.find("\"" + key + "\"");
    return at(found == std::string_view::npos ? 1 : found + 1);
  }
};

// Parses a line. The parser's message "line: byte N: ..." becomes "NAME:LINE:N: ...".
Json parse_line(const RecordLine& line) {
  const std::string where = "line";
  try {
    return parse_json(line.text, where, kRecordLimits);
  } catch (const Error& error) {
    std::string_view message = error.what();
    const std::string prefix = where + ": byte ";
    size_t column = 0;
    if (message.starts_with(prefix)) {
      message.remove_prefix(prefix.size());
      const auto [end, status] = std::from_chars(message.data(), message.data() + message.size(), column);
      message.remove_prefix(static_cast<size_t>(end - message.data()));
      if (message.starts_with(": ")) message.remove_prefix(2);
    }
    raise(ErrorKind::kFormat, "{}: {}", line.at(std::max<size_t>(column, 1)), message);
  }
}

class ScoreRecordReader {
 public:
  ScoreRecordReader(const RecordLine& line, const ScoreKeys& keys, const text::Tokenizer& tokenizer,
                    const ModelConfig& config)
      : line_(line), keys_(keys), tokenizer_(tokenizer), config_(config), json_(parse_line(line)) {
    TESSERA_CHECK(json_.is_object(), ErrorKind::kFormat, "{}: found {}, wanted an object", line.at(1), describe(json_));
  }

  ScoreRecord read() const {
    ScoreRecord record;
    record.id = json_.contains(keys_.id) ? json_[keys_.id] : Json(line_.number);
    check_one_kind();
    if (!json_.contains(keys_.prompt)) {
      record.sequences.push_back(text_sequence(string_at("text")));
    } else if (json_.contains("choices")) {
      read_choices(record);
    } else {
      record.sequences.push_back(completion_sequence(prompt_tokens(), string_at(keys_.completion), keys_.completion));
    }
    return record;
  }

 private:
  void check_one_kind() const {
    const bool has_text = json_.contains("text") && !json_["text"].is_null();
    const bool has_prompt = json_.contains(keys_.prompt) && !json_[keys_.prompt].is_null();
    // A record with both `text` and a prompt is an error, because either could be scored. With --completion-key it is
    // allowed: prompt and completion are scored (as for human-eval), and `text` is ignored.
    const bool has_completion_key = keys_.completion != ScoreKeys().completion;
    TESSERA_CHECK(!has_text || !has_prompt || has_completion_key, ErrorKind::kFormat,
                  "{}: found both 'text' and '{}', wanted one of them. Leave out the one that is not to be scored; "
                  "with --completion-key a text is ignored.",
                  line_.at_key("text"), quoted(keys_.prompt));
  }
  std::string string_at(const std::string& key) const {
    TESSERA_CHECK(json_.contains(key), ErrorKind::kFormat,
                  "{}: no '{}'; wanted 'text', '{}' and '{}', or '{}' and 'choices'", line_.at(1), quoted(key),
                  quoted(keys_.prompt), quoted(keys_.completion), quoted(keys_.prompt));
    const Json& value = json_[key];
    TESSERA_CHECK(value.is_string(), ErrorKind::kFormat, "{}: '{}' is {}, wanted a string", line_.at_key(key),
                  quoted(key), describe(value));
    return value.get<std::string>();
  }
  static std::string quoted(const std::string& key) { return escape(key, 60); }

  std::vector<int64_t> checked(const std::vector<text::TokenId>& ids, const std::string& key) const {
    text::check_embedding_rows(tokenizer_, ids, config_.vocab_size,
                               fmt::format("{}: '{}'", line_.at_key(key), quoted(key)));
    return {ids.begin(), ids.end()};
  }

  void check_length(const ScoreSequence& sequence, const std::string& key) const {
    TESSERA_CHECK(static_cast<int64_t>(sequence.tokens.size()) <= config_.context_tokens, ErrorKind::kFormat,
                  "{}: {} tokens, the model's context is {}. Split it.", line_.at_key(key), sequence.tokens.size(),
                  config_.context_tokens);
  }

  ScoreSequence text_sequence(const std::string& text) const {
    // The first token has no log-prob, as nothing comes before it; a text of no tokens has no scored tokens.
    ScoreSequence sequence{.tokens = checked(text::encode_document(tokenizer_, text).ids, "text")};
    sequence.first = std::min<size_t>(1, sequence.tokens.size());
    check_length(sequence, "text");
    return sequence;
  }

  std::vector<int64_t> prompt_tokens() const {
    auto tokens = checked(text::encode_document(tokenizer_, string_at(keys_.prompt)).ids, keys_.prompt);
    const auto eos = tokenizer_.eos_id();
    if (eos && !tokens.empty() && tokens.back() == *eos) tokens.pop_back();  // removes the EOS that the tokenizer added
    return tokens;
  }

  // The sequence of a prompt and a completion. Both are tokenized separately, so that the tokens of the prompt are the
  // same for all choices.
  ScoreSequence completion_sequence(std::vector<int64_t> prompt, const std::string& text,
                                    const std::string& key) const {
    ScoreSequence sequence{.tokens = std::move(prompt)};
    auto more = checked(tokenizer_.encode(text, {.add_special_tokens = false}), key);
    // Some tokenizers add BOS even without special tokens; it must not occur in the middle of a text.
    const auto bos = tokenizer_.bos_id();
    if (bos && bos != tokenizer_.eos_id() && !sequence.tokens.empty() && !more.empty() && more.front() == *bos) {
      more.erase(more.begin());
    }
    sequence.first = sequence.tokens.size();
    sequence.tokens.insert(sequence.tokens.end(), more.begin(), more.end());
    // Without a prompt the first token has no log-prob, because nothing comes before it.
    if (sequence.first == 0) sequence.first = std::min<size_t>(1, sequence.tokens.size());
    check_length(sequence, key);
    return sequence;
  }

  void read_choices(ScoreRecord& record) const {
    const Json& choices = json_["choices"];
    TESSERA_CHECK(choices.is_array() && !choices.empty() && static_cast<int64_t>(choices.size()) <= kMostChoices,
                  ErrorKind::kFormat, "{}: 'choices' is {}, wanted an array of 1 to {} strings",
                  line_.at_key("choices"), describe(choices), kMostChoices);
    record.choices = true;
    const auto prompt = prompt_tokens();
    for (const auto& choice : choices) {
      TESSERA_CHECK(choice.is_string(), ErrorKind::kFormat, "{}: choice {} is {}, wanted a string",
                    line_.at_key("choices"), record.sequences.size(), describe(choice));
      record.sequences.push_back(completion_sequence(prompt, choice.get<std::string>(), "choices"));
    }
    if (!json_.contains("answer") || json_["answer"].is_null()) return;
    const Json& answer = json_["answer"];
    const int64_t chosen = answer.is_number_integer() ? answer.get<int64_t>() : -1;
    TESSERA_CHECK(chosen >= 0 && chosen < static_cast<int64_t>(choices.size()), ErrorKind::kFormat,
                  "{}: 'answer' is {}, wanted the number of a choice, 0 to {}", line_.at_key("answer"),
                  describe(answer), choices.size() - 1);
    record.answer = chosen;
  }

  const RecordLine& line_;
  const ScoreKeys& keys_;
  const text::Tokenizer& tokenizer_;
  const ModelConfig& config_;
  Json json_;
};

}  // namespace

std::vector<ScoreRecord> read_score_records(std::string_view content, const std::string& name, const ScoreKeys& keys,
                                            const text::Tokenizer& tokenizer, const ModelConfig& config) {
  std::vector<ScoreRecord> records;
  if (content.starts_with("\xef\xbb\xbf")) content.remove_prefix(3);  // a byte order mark
  size_t number = 0;
  for (size_t at = 0; at < content.size();) {
    const size_t end = std::min(content.find('\n', at), content.size());
    const RecordLine line{content.substr(at, end - at), name, ++number};
    at = end + 1;
    if (line.text.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    records.push_back(ScoreRecordReader(line, keys, tokenizer, config).read());
  }
  return records;
}

}  // namespace tessera::cli
