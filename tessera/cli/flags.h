// Flags that every verb has, on top of CLI11. Only sources include <CLI/CLI.hpp> (5 s to compile).
//
//   auto app = make_app("generate");
//   app->add_option("--model", dir, "Hugging Face folder")->required();
//   if (const auto code = parse_flags(*app, args)) return *code;
//
// Not thread-safe: parsing sets the process's log level.
#pragma once

#include <c10/core/ScalarType.h>

#include <memory>
#include <optional>
#include <string>

#include "tessera/cli/verbs.h"

namespace CLI {
class App;
}

namespace tessera {
struct GenerationOptions;
struct ModelConfig;
}  // namespace tessera

namespace tessera::cli {

// An App for `tessera VERB` with the verb's line of the table as description, --help and --log-level.
std::shared_ptr<CLI::App> make_app(const std::string& verb);

// Fills the variables bound to `app`. A value means: return it at once (0 after --help was printed on stdout).
// Error kConfig names a wrong flag, the nearest flag and the verb's --help.
std::optional<int> parse_flags(CLI::App& app, VerbArguments args);

// --model and --device, as the verbs that run a model have them; where `positional` holds, MODEL alone will do.
void add_model_flags(CLI::App& app, std::string& model, std::string& device, bool positional = false);
// --dtype of the verbs that generate: kernels::RowDtype's names, or empty.
void add_row_dtype_flag(CLI::App& app, std::string& dtype);

// --max-model-len of the verbs that generate, which vLLM and llama.cpp (-c, --ctx-size) have, too; 0: the model's
// context.
void add_context_flag(CLI::App& app, int64_t& context_tokens);
// Makes it the context of both, with a warning where it is longer than the model's own.
void set_context(int64_t context_tokens, ModelConfig& config, GenerationOptions& options);

// Standard input to its end. Errors begin with `where`: kConfig beyond so many bytes, kIo where it cannot be read.
std::string read_standard_input(const char* where, size_t most_bytes);

// What --dtype says; empty: nothing. Error kConfig, naming the verb, for no dtype of weights.
std::optional<c10::ScalarType> parse_dtype_flag(const char* verb, const std::string& name);

}  // namespace tessera::cli
