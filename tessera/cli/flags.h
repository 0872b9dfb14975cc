// Flags that several verbs share, on top of CLI11. Headers do not include <CLI/CLI.hpp>, which takes 5 s to compile.
//
//   auto app = make_app("generate");
//   app->add_option("--model", dir, "Hugging Face folder")->required();
//   if (const auto code = parse_flags(*app, args)) return *code;
//
// Not thread-safe: parsing sets the log level of the process.
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

// An App for `tessera VERB` with --help and --log-level; its description is the help line of the verb.
std::shared_ptr<CLI::App> make_app(const std::string& verb);

// Parses `args` into the variables that are bound to `app`. If it returns an exit code, the verb returns this code at
// once (0 after --help was printed to stdout). Error kConfig names the wrong flag, the nearest flag and --help.
std::optional<int> parse_flags(CLI::App& app, VerbArguments args);

// --model and --device of the verbs that run a model. With `positional` the model may also be given without --model.
void add_model_flags(CLI::App& app, std::string& model, std::string& device, bool positional = false);
// --dtype of the verbs that generate text: a name of kernels::WeightFormat, or empty.
void add_row_dtype_flag(CLI::App& app, std::string& dtype);

// --max-model-len of the verbs that generate text, as in vLLM, or -c and --ctx-size as in llama.cpp. 0: the context of
// the model.
void add_context_flag(CLI::App& app, int64_t& context_tokens);
// Sets the context length of `config` and `options` to context_tokens, unless context_tokens is 0. Logs a warning if
// context_tokens is above the context length that `config` has before the call (the model's own).
void set_context(int64_t context_tokens, ModelConfig& config, GenerationOptions& options);

// Reads standard input to its end. Error messages begin with `where`: kConfig for more than `max_bytes` bytes, kIo if
// reading fails.
std::string read_standard_input(const char* where, size_t max_bytes);

// Parses the value of --dtype; empty text gives no dtype. Error kConfig, which names the verb, for an unknown dtype.
std::optional<c10::ScalarType> parse_dtype_flag(const char* verb, const std::string& name);

}  // namespace tessera::cli
