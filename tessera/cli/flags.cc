#include "tessera/cli/flags.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <string_view>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/text/nearest.h"
#include "tessera/models/config/config.h"
#include "tessera/models/generation/generate.h"

namespace tessera::cli {
namespace {

void collect_flags(const CLI::App& app, std::vector<std::string>& names) {
  for (const auto* option : app.get_options()) {
    for (const auto& name : option->get_lnames()) names.push_back("--" + name);
  }
  for (const auto* inner : app.get_subcommands(nullptr)) {
    collect_flags(*inner, names);
    names.push_back(inner->get_name());
  }
}

// A message about the first flag or word that CLI11 did not know, with the nearest known flag or subcommand.
std::string unknown_word_message(const CLI::App& app, const std::vector<std::string>& words) {
  // A known flag is suggested only if its edit distance is at most a third of the word's length (2 for short words); a
  // less similar one would mislead.
  std::vector<std::string> names;
  collect_flags(app, names);
  std::string word = words.front();
  word = word.substr(0, word.find('='));
  const std::vector<std::string_view> views(names.begin(), names.end());
  const bool flag = word.rfind("-", 0) == 0;
  std::string message = fmt::format("unknown {} '{}'.", flag ? "flag" : "argument", word);
  const std::string_view closest = nearest(word, views);
  if (edit_distance(word, closest) <= std::max<size_t>(2, word.size() / 3)) {
    message += fmt::format(" Did you mean '{}'?", closest);
  }
  return message;
}

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

// Prints an option as "--port N [8000]", and a positional argument as its name alone. CLI11's own formatter would print
// "--port INT:INT in [0 - 65535]=8000" and "PATH TEXT REQUIRED".
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_option_opts(const CLI::Option* option) const override {
    if (option->get_positional()) return "";
    if (!option->get_option_text().empty()) return " " + option->get_option_text();
    if (option->get_type_size() == 0) return "";
    auto value = option->get_type_name();
    value.resize(std::min(value.find(':'), value.size()));  // CLI11 appends the validator after a colon
    if (value == "INT" || value == "UINT") value = "N";
    if (value == "FLOAT") value = "X";
    if (!option->get_default_str().empty()) value += fmt::format(" [{}]", option->get_default_str());
    if (option->get_expected_max() > 1) value += " ...";
    if (option->get_required()) value += ", required";
    return " " + value;
  }
};

}  // namespace

std::shared_ptr<CLI::App> make_app(const std::string& verb) {
  const Verb* entry = find_verb(verb);
  TESSERA_CHECK(entry, ErrorKind::kInternal, "[cli] no verb '{}' in the table", verb);
  auto app = std::make_shared<CLI::App>(entry->help, "tessera " + verb);
  app->set_help_flag("-h,--help", "Print this help");
  app->add_option_function<std::string>(
         "--log-level", [](const std::string& name) { set_log_level(parse_log_level(name)); },
         "debug, info, warning, error or off")
      ->type_name("LEVEL")
      ->default_str("info");
  app->formatter(std::make_shared<HelpFormatter>());
  app->get_formatter()->column_width(34);
  return app;
}

std::optional<int> parse_flags(CLI::App& app, VerbArguments args) {
  std::vector<std::string> reversed(args.rbegin(), args.rend());  // CLI11 expects the last argument first
  try {
    app.parse(std::move(reversed));
  } catch (const CLI::CallForHelp&) {  // prints the help of the innermost subcommand that was named
    const CLI::App* innermost = &app;
    std::string outer;  // "tessera ckpt" of "tessera ckpt verify"
    while (!innermost->get_subcommands().empty()) {
      outer += (outer.empty() ? "" : " ") + innermost->get_name();
      innermost = innermost->get_subcommands().front();
    }
    std::fputs(innermost->help(outer).c_str(), stdout);
    return 0;
  } catch (const CLI::ParseError& error) {
    // For a misspelt subcommand CLI11 reports that the subcommand is missing, and leaves the misspelt word in
    // remaining().
    const auto words = app.remaining(/*recurse=*/true);
    const bool lacks_subcommand = app.get_subcommands().empty() && !app.get_subcommands(nullptr).empty();
    const bool is_unknown = dynamic_cast<const CLI::ExtrasError*>(&error) || (lacks_subcommand && !words.empty());
    raise(ErrorKind::kConfig, "[{}] {} See '{} --help'.", app.get_name(),
          is_unknown ? unknown_word_message(app, words) : one_line(error.what()) + ".", app.get_name());
  }
  return std::nullopt;
}

void add_model_flags(CLI::App& app, std::string& model, std::string& device, bool positional) {
  app.add_option(positional ? "MODEL,--model" : "--model", model,
                 std::string("Hugging Face folder, GGUF file, or ORG/NAME in the Hub's local cache") +
                     (positional ? "; MODEL alone or --model MODEL" : ""))
      ->required()
      ->type_name("MODEL");
  app.add_option("--device", device, "auto, cpu, cuda, cuda:N or a registered accelerator (default: auto)");
}

void add_row_dtype_flag(CLI::App& app, std::string& dtype) {
  app.add_option(
      "--dtype", dtype,
      "Weights in memory: float32, bfloat16, float16, int8 or int4 (default: as stored; those of a quantised "
      "GGUF file as float32)");
}

void add_context_flag(CLI::App& app, int64_t& context_tokens) {
  app.add_option("--max-model-len,--ctx-size,-c", context_tokens,
                 "Tokens that prompt and answer may have together; 0: as the model's config.json says (default)")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 40));
}

void set_context(int64_t context_tokens, ModelConfig& config, GenerationOptions& options) {
  if (context_tokens == 0) return;
  if (context_tokens > config.context_tokens) {
    log_warning("--max-model-len {}: the model's own context is {} tokens; beyond it the text may get worse",
                context_tokens, config.context_tokens);
  }
  config.context_tokens = options.context_tokens = context_tokens;
}

std::string read_standard_input(const char* where, size_t max_bytes) {
  std::string text;
  char buffer[1 << 16];
  while (const size_t got = std::fread(buffer, 1, sizeof buffer, stdin)) {
    text.append(buffer, got);
    TESSERA_CHECK(text.size() <= max_bytes, ErrorKind::kConfig, "{}: more than {} bytes", where, max_bytes);
  }
  TESSERA_CHECK(!std::ferror(stdin), ErrorKind::kIo, "{}: standard input cannot be read", where);
  return text;
}

std::optional<c10::ScalarType> parse_dtype_flag(const char* verb, const std::string& name) {
  if (name.empty()) return std::nullopt;
  const auto dtype = parse_dtype_name(name);
  TESSERA_CHECK(dtype, ErrorKind::kConfig, "[{}] --dtype: found '{}', wanted float32, bfloat16 or float16", verb, name);
  return dtype;
}

}  // namespace tessera::cli
