// What `tessera generate` was asked for, and the prompts that come of it.
#pragma once

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/text/json.h"
#include "tessera/models/generation/generate.h"
#include "tessera/text/chat/chat_template.h"
#include "tessera/text/grammar/token_constraint.h"
#include "tessera/text/tokenizer.h"

namespace tessera::cli {

struct GenerateFlags {
  std::string model, dtype, device = "auto", system, batch, json_schema;
  std::optional<std::string> prompt;
  std::vector<std::string> stop;
  bool chat = false, json = false;
  int64_t nproc = 1, context_tokens = 0;
  // Absent: as generation_config.json says.
  std::optional<double> temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
  std::optional<int64_t> top_k, max_new_tokens;
  std::optional<uint64_t> seed;
};

// Tokenizer and chat template of the model, and the form of its answers.
class Prompts {
 public:
  // `token_rows` are the tokens that the model knows. Error kConfig where a chat is wanted and the folder has no
  // template, and for a schema that is not supported.
  Prompts(const GenerateFlags& flags, int64_t token_rows);
  const text::Tokenizer& tokenizer() const { return tokenizer_; }
  const std::optional<text::ChatTemplate>& chat() const { return chat_; }
  // The ids that the model reads, with special tokens where the tokenizer or the template puts them. Error kConfig,
  // which begins with `where`, for a token that the model has no row for.
  std::vector<int64_t> of_text(const std::string& text, const std::string& where) const;
  std::vector<int64_t> of_messages(const Json& messages, const std::string& where) const;
  // The options of one sequence: its text will be one that the schema takes, where there is one.
  GenerationOptions of_sequence(const GenerationOptions& options) const;

 private:
  std::vector<int64_t> checked(const std::vector<text::TokenId>& ids, const std::string& where) const;

  text::Tokenizer tokenizer_;
  int64_t token_rows_;
  std::optional<text::ChatTemplate> chat_;
  std::shared_ptr<text::GrammarMasks> form_;
};

class Generator;
// Answers one line of standard input after the other until it ends or says /exit.
void run_chat(Generator& generator, const GenerateFlags& flags, const GenerationOptions& options,
              const Prompts& prompts);
// Every line of flags.batch to a line on standard output.
void run_batch(Generator& generator, const GenerateFlags& flags, const GenerationOptions& options,
               const Prompts& prompts);
inline constexpr size_t kMostPromptBytes = 64 << 20;  // of standard input
// The system message, where there is one, and then what the user says first.
Json opening_messages(const GenerateFlags& flags, std::optional<std::string> user = std::nullopt);
// One object for a text and its tokens: prompt_tokens, tokens, text.
Json generation_object(const std::vector<int64_t>& prompt, const std::vector<int64_t>& tokens, const std::string& text);
// Text of the model on standard output, at once. Where that is a terminal, characters that the terminal would obey are
// escaped. False when the reader has gone.
bool write_text(const std::string& text);
// The object on a line of standard output.
void print_object(const Json& object);

}  // namespace tessera::cli
