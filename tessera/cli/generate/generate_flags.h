// The flags of `tessera generate`, and the prompts that are made from them.
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
  // If a flag was not given, its member is nullopt and the value of generation_config.json applies.
  std::optional<double> temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
  std::optional<int64_t> top_k, max_new_tokens;
  std::optional<uint64_t> seed;
};

// Makes prompts with the tokenizer and the chat template of the model, and holds the grammar of --json-schema.
class Prompts {
 public:
  // Loads the tokenizer and chat template of the folder flags.model, and compiles the grammar of --json-schema.
  // `token_rows` is the number of rows of the model's embedding; encode_text() and encode_messages() refuse token ids
  // that are not below it. Error kConfig if --chat is given and the folder has no chat template, and for a JSON Schema
  // that is not supported.
  Prompts(const GenerateFlags& flags, int64_t token_rows);
  const text::Tokenizer& tokenizer() const { return tokenizer_; }
  const std::optional<text::ChatTemplate>& chat() const { return chat_; }
  // Token ids of a text, or of chat messages in the template, with the special tokens that the tokenizer or the
  // template adds. Error kConfig, which begins with `where`, for a token id without a row in the embedding.
  std::vector<int64_t> encode_text(const std::string& text, const std::string& where) const;
  std::vector<int64_t> encode_messages(const Json& messages, const std::string& where) const;
  // Returns a copy of `options` for one sequence; with --json-schema the copy has a new token constraint, which no
  // other sequence uses.
  GenerationOptions sequence_options(const GenerationOptions& options) const;

 private:
  std::vector<int64_t> checked(const std::vector<text::TokenId>& ids, const std::string& where) const;

  text::Tokenizer tokenizer_;
  int64_t token_rows_;
  std::optional<text::ChatTemplate> chat_;
  std::shared_ptr<text::GrammarMasks> grammar_masks_;
};

class Generator;
// Answers each line of standard input as a chat message, until standard input ends or a line is /exit.
void run_chat(Generator& generator, const GenerateFlags& flags, const GenerationOptions& options,
              const Prompts& prompts);
// Generates for every line of the file flags.batch, and prints one line per result to standard output.
void run_batch(Generator& generator, const GenerateFlags& flags, const GenerationOptions& options,
               const Prompts& prompts);
inline constexpr size_t kMostPromptBytes = 64 << 20;  // the most bytes that are read from standard input
// The first messages of a chat: the system message if there is one, then the message `user` if it is given.
Json opening_messages(const GenerateFlags& flags, std::optional<std::string> user = std::nullopt);
// The JSON object of one result: prompt_tokens, tokens, text.
Json generation_object(const std::vector<int64_t>& prompt, const std::vector<int64_t>& tokens, const std::string& text);
// Writes text of the model to standard output and flushes. If that is a terminal, control characters are escaped.
// Returns false if standard output has an error, for example because its reader has ended.
bool write_text(const std::string& text);
// Prints the object as one line on standard output.
void print_object(const Json& object);

}  // namespace tessera::cli
