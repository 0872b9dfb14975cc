// `tessera generate`: continues a prompt or answers it as a chat message, once, for every line of a file, or in a chat.
#include "tessera/models/generation/generate.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/log.h"
#include "tessera/base/text/json_numbers.h"
#include "tessera/base/text/quote.h"
#include "tessera/cli/flags.h"
#include "tessera/cli/generate/generate_flags.h"
#include "tessera/cli/generate/generator.h"
#include "tessera/cli/ranks.h"
#include "tessera/cli/verbs.h"
#include "tessera/comm/rendezvous/world.h"
#include "tessera/models/config/end_tokens.h"
#include "tessera/models/files/model_path.h"
#include "tessera/models/generation/load.h"
#include "tessera/models/generation/text_stream.h"
#include "tessera/text/chat/chat_prompt.h"
#include "tessera/text/document.h"
#include "tessera/text/embedding_rows.h"
#include "tessera/text/grammar/json_schema.h"

namespace tessera::cli {
namespace {

void add_sampling_flags(CLI::App& app, GenerateFlags& flags) {
  app.add_option("--max-new-tokens", flags.max_new_tokens,
                 "Most tokens to generate (default: that of generation_config.json, else 128)");
  app.add_option("--temperature", flags.temperature, "Sample at this temperature; 0: greedy");
  app.add_option("--top-k", flags.top_k, "Sample from the K likeliest tokens; 0: from all tokens");
  app.add_option("--top-p", flags.top_p, "Sample from the likeliest tokens whose probabilities add up to this");
  app.add_option("--min-p", flags.min_p,
                 "Sample from tokens with at least this fraction of the likeliest token's probability");
  app.add_option("--repetition-penalty", flags.repetition_penalty,
                 "Lower the logits of tokens that occur in prompt or text by this factor; 1: no penalty");
  app.add_option("--presence-penalty", flags.presence_penalty,
                 "Subtract this from the logits of tokens that were generated, -2 to 2");
  app.add_option("--frequency-penalty", flags.frequency_penalty,
                 "Subtract this from the logit of a token for each time it was generated, -2 to 2");
  app.add_option("--seed", flags.seed, "Sample with this seed; the same seed gives the same text (default: 0)");
  app.add_option("--stop", flags.stop, "End before this text; may be given several times")->take_all();
}

std::optional<int> read_flags(VerbArguments args, GenerateFlags& flags) {
  const auto app = make_app("generate");
  add_model_flags(*app, flags.model, flags.device);
  app->add_option("--prompt", flags.prompt,
                  "Text to continue, or with --chat the user's message; '-' reads standard input");
  app->add_flag(
      "--chat", flags.chat,
      "Put the prompt into the model's chat template. Without --prompt: chat, where each line of standard input is a "
      "message (/clear forgets the conversation, /exit ends the chat, Ctrl-C ends an answer)");
  app->add_option("--system", flags.system, "With --chat: the system message");
  app->add_option(
      "--batch", flags.batch,
      "JSONL file; '-' reads standard input. Each line has \"prompt\" or \"messages\", and optionally \"id\", and "
      "becomes a line on standard output, in the same order");
  add_sampling_flags(*app, flags);
  app->add_option("--json-schema", flags.json_schema,
                  "File with a JSON Schema; the generated text is JSON that is valid under it");
  app->add_flag("--json", flags.json, "Print one JSON object at the end instead of text: prompt_tokens, tokens, text");
  add_row_dtype_flag(*app, flags.dtype);
  add_context_flag(*app, flags.context_tokens);
  app->add_option("--nproc", flags.nproc, "Local ranks to start; the model is sharded over them")->option_text("N");
  app->footer(
      "Greedy, unless a sampling flag is given or generation_config.json has do_sample: true. Settings without a flag "
      "come from\n"
      "generation_config.json; a line on standard error lists those that were taken from it.");
  auto code = parse_flags(*app, args);
  if (code) return code;
  const auto require = [](bool holds, const char* message) {
    TESSERA_CHECK(holds, ErrorKind::kConfig, "[generate] {}", message);
  };
  require(flags.prompt || flags.chat || !flags.batch.empty(),
          "nothing to continue: give --prompt TEXT, --batch FILE, or --chat for a chat");
  require(flags.batch.empty() || (!flags.prompt && !flags.json), "--batch cannot be used with --prompt or --json");
  require(flags.system.empty() || flags.chat, "--system is a message of a chat. Add --chat.");
  require(flags.prompt || !flags.batch.empty() || (flags.nproc == 1 && !flags.json),
          "a chat without --prompt cannot be used with --nproc or --json");
  flags.model = resolve_model_path(flags.model, "--model");
  return std::nullopt;
}

// Sets `value` from the flag if the flag is given; otherwise `value` stays as generation_config.json has set it.
// Appends name and value to `taken` if the value comes from this file, that is, if it differs from `neutral`, the
// default without the file.
template <class T>
void set_from_flag(const char* name, const std::optional<T>& flag, T neutral, T& value, std::string& taken) {
  if (flag) {
    value = *flag;
  } else if (value != neutral) {
    taken += fmt::format("{}{} {}", taken.empty() ? "" : ", ", name, value);
  }
}

GenerationOptions generation_options(const GenerateFlags& flags, const ModelConfig& config) {
  auto options = GenerationOptions::from_folder(flags.model, config);
  const GenerationOptions neutral;
  // Sampling is on with --temperature above 0, or another sampling flag, or do_sample of generation_config.json.
  // `of_samples` collects values of the file that matter only for sampling; the log names them only when sampling is
  // on.
  const bool asked = flags.temperature || flags.top_k || flags.top_p || flags.min_p || flags.seed;
  options.sample = flags.temperature ? *flags.temperature != 0 : asked || options.folder_samples;
  std::string taken, of_samples;
  set_from_flag("max_new_tokens", flags.max_new_tokens, neutral.max_new_tokens, options.max_new_tokens, taken);
  set_from_flag("repetition_penalty", flags.repetition_penalty, neutral.repetition_penalty, options.repetition_penalty,
                taken);
  set_from_flag("temperature", options.sample ? flags.temperature : std::nullopt, neutral.temperature,
                options.temperature, of_samples);
  set_from_flag("top_k", flags.top_k, neutral.top_k, options.top_k, of_samples);
  set_from_flag("top_p", flags.top_p, neutral.top_p, options.top_p, of_samples);
  set_from_flag("min_p", flags.min_p, neutral.min_p, options.min_p, of_samples);
  options.presence_penalty = flags.presence_penalty.value_or(0);
  options.frequency_penalty = flags.frequency_penalty.value_or(0);
  options.seed = flags.seed.value_or(options.seed);
  options.check();
  if (options.sample && !asked) of_samples = "do_sample" + (of_samples.empty() ? "" : ", " + of_samples);
  if (options.sample && !of_samples.empty()) taken += (taken.empty() ? "" : ", ") + of_samples;
  if (!taken.empty()) log_info("[generate] from generation_config.json: {}", taken);
  return options;
}

void run_prompt(Generator& generator, const GenerateFlags& flags, const GenerationOptions& options,
                const Prompts& prompts, const std::vector<int64_t>& prompt) {
  TextStream stream(prompts.tokenizer(), flags.stop, options.stop_tokens);
  std::vector<int64_t> tokens;
  std::string text;
  generator.run({.prompt = prompt, .options = prompts.sequence_options(options), .on_token = [&](const NewToken& made) {
                   tokens.push_back(made.token);
                   const auto piece = stream.push(made.token);
                   text += piece;
                   return (flags.json || write_text(piece)) && !stream.stopped();
                 }});
  // The stream holds back the bytes of an incomplete UTF-8 character, and text that may be the beginning of a stop
  // string.
  const auto last_piece = stream.finish();
  if (flags.json) {
    print_object(generation_object(prompt, tokens, text + last_piece));
  } else {
    write_text(last_piece + "\n");
  }
}

}  // namespace

Prompts::Prompts(const GenerateFlags& flags, int64_t token_rows)
    : tokenizer_(text::Tokenizer::from_folder(flags.model)), token_rows_(token_rows) {
  if (!flags.json_schema.empty()) {
    constexpr JsonLimits kLimits{.max_bytes = 16 << 20, .exact_numbers = true};
    const auto where = "[generate] " + flags.json_schema;
    const Json schema = parse_json(read_file(flags.json_schema, kLimits.max_bytes), where, kLimits);
    // The schema becomes a grammar over bytes, compiled once with masks over the vocabulary; each sequence then has a
    // constraint of its own (sequence_options()) that follows the grammar's state.
    text::GrammarBuilder build;
    text::JsonParts json(build);
    const auto root = text::JsonSchema(json, JsonReader(schema, where, ErrorKind::kConfig)).value();
    grammar_masks_ = std::make_shared<text::GrammarMasks>(std::move(build).finish(root),
                                                          std::make_shared<const text::SortedVocabulary>(tokenizer_));
  }
  chat_ = flags.chat ? text::ChatTemplate::from_folder(flags.model) : find_chat_template(flags.model);
  TESSERA_CHECK(chat_ || !flags.chat, ErrorKind::kConfig, "[generate] {}: holds no chat template. Leave out --chat.",
                flags.model);
}

GenerationOptions Prompts::sequence_options(const GenerationOptions& options) const {
  auto own = options;
  if (grammar_masks_) own.constraint = std::make_shared<text::TokenConstraint>(grammar_masks_, options.stop_tokens);
  return own;
}

std::vector<int64_t> Prompts::checked(const std::vector<text::TokenId>& ids, const std::string& where) const {
  text::check_embedding_rows(tokenizer_, ids, token_rows_, where);
  return {ids.begin(), ids.end()};
}

std::vector<int64_t> Prompts::encode_text(const std::string& text, const std::string& where) const {
  return checked(text::encode_document(tokenizer_, text).ids, where);
}

std::vector<int64_t> Prompts::encode_messages(const Json& messages, const std::string& where) const {
  return checked(text::chat_prompt(*chat_, tokenizer_, messages), where);
}

Json opening_messages(const GenerateFlags& flags, std::optional<std::string> user) {
  Json messages = Json::array();
  if (!flags.system.empty()) messages.push_back({{"role", "system"}, {"content", flags.system}});
  if (user) messages.push_back({{"role", "user"}, {"content", std::move(*user)}});
  return messages;
}

Json generation_object(const std::vector<int64_t>& prompt, const std::vector<int64_t>& tokens,
                       const std::string& text) {
  return {{"prompt_tokens", prompt}, {"tokens", tokens}, {"text", text}};
}

bool write_text(const std::string& text) {
  static const bool is_terminal = ::isatty(STDOUT_FILENO) == 1;
  const auto shown = is_terminal ? escape_controls(text) : text;
  std::fwrite(shown.data(), 1, shown.size(), stdout);
  std::fflush(stdout);
  return std::ferror(stdout) == 0;
}

void print_object(const Json& object) {
  std::printf("%s\n", escape_controls(dump_json(object), "\\u00").c_str());  // escapes do not change the JSON value
  std::fflush(stdout);
}

int run_generate(VerbArguments args) {
  GenerateFlags flags;
  if (const auto code = read_flags(args, flags)) return *code;
  // Flags, config and other small inputs are read and checked here, so that an error in them ends the process before
  // ranks start and weights are loaded.
  auto config = ModelConfig::from_folder(flags.model);
  auto options = generation_options(flags, config);
  set_context(flags.context_tokens, config, options);
  if (!packed_row_dtype(flags.dtype)) parse_dtype_flag("generate", flags.dtype);
  if (const auto code = launch_ranks("generate", args, flags.nproc)) return *code;
  const auto world = join_world({.nproc = static_cast<int>(flags.nproc)});
  const bool first = world->rank() == 0;
  std::vector<int64_t> prompt;
  std::optional<int64_t> cache;  // size in tokens for the prompt; set only on a single rank, see below
  const Prompts prompts(flags, config.vocab_size);
  options.stop_tokens = end_tokens(flags.model, config, prompts.tokenizer(), prompts.chat());
  if (first) warn_of_unlisted_ends(flags.model, config, prompts.tokenizer(), options.stop_tokens);
  const auto read_prompt = [&] {
    constexpr const char* kPrompt = "[generate] the prompt";
    const auto text =
        *flags.prompt == "-" ? read_standard_input("[generate] --prompt -", kMostPromptBytes) : *flags.prompt;
    prompt = flags.chat ? prompts.encode_messages(opening_messages(flags, text), kPrompt)
                        : prompts.encode_text(text, kPrompt);
    cache = generation_capacity(config, prompt, options);
  };
  // A single rank reads the prompt before the model is loaded, so that the KV cache is no larger than this prompt and
  // its answer need. With several ranks the size of the KV cache does not depend on the prompt: all ranks must choose
  // the same size, but only rank 0 reads the prompt (it may be standard input), after the model is loaded.
  if (flags.prompt && world->size() == 1) read_prompt();
  Generator generator(flags, config, cache, world);
  if (!first) {
    generator.follow();
  } else if (flags.prompt) {
    if (prompt.empty()) read_prompt();  // an error here ends the other ranks, too
    run_prompt(generator, flags, options, prompts, prompt);
  } else {
    (flags.batch.empty() ? run_chat : run_batch)(generator, flags, options, prompts);
  }
  return 0;
}

}  // namespace tessera::cli
