// `tessera generate --batch FILE`: many prompts, computed together.
#include <algorithm>
#include <deque>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/cli/flags.h"
#include "tessera/cli/generate/generate_flags.h"
#include "tessera/cli/generate/generator.h"
#include "tessera/data/records/messages.h"
#include "tessera/models/generation/text_stream.h"

namespace tessera::cli {
namespace {

constexpr size_t kMostBytes = size_t{1} << 30;
constexpr size_t kMaxSequences = 128;  // sequences that are in the engine at the same time, running or waiting

struct BatchPrompt {
  Json id;  // null: the line has no id
  std::vector<int64_t> prompt;
};

struct BatchResult {
  const BatchPrompt* batch_prompt;
  TextStream stream;
  std::vector<int64_t> tokens{};
  std::string text{}, finish{"stop"};
  std::optional<Error> error{};
  bool done = false;
};

BatchPrompt parse_batch_line(std::string_view line, const std::string& where, const GenerateFlags& flags,
                             const Prompts& prompts) {
  const Json row = parse_json_object(line, where, {.exact_numbers = true});
  const JsonReader reader(row, where);
  BatchPrompt batch_prompt;
  if (row.contains("id")) batch_prompt.id = row["id"];
  TESSERA_CHECK(reader.has("prompt") != reader.has("messages"), ErrorKind::kFormat,
                "{}: found {}, wanted \"prompt\" or \"messages\"", where,
                reader.has("prompt") ? "both" : "neither of them");
  for (const auto& [key, value] : reader.members()) {
    TESSERA_CHECK(key == "id" || key == "prompt" || key == "messages", ErrorKind::kFormat,
                  "{}: unknown key; a line has \"id\" and \"prompt\" or \"messages\"", value.name());
  }
  if (!flags.chat) {
    TESSERA_CHECK(reader.has("prompt"), ErrorKind::kFormat, "{}: \"messages\" need the chat template. Add --chat.",
                  where);
    batch_prompt.prompt = prompts.encode_text(reader.string("prompt"), where);
    return batch_prompt;
  }
  // With --chat a plain prompt is a single user message; --system is put before the messages of every line.
  Json messages = reader.has("messages") ? data::openai_messages(row["messages"], "messages", where)
                                         : Json::array({{{"role", "user"}, {"content", reader.string("prompt")}}});
  if (!flags.system.empty()) messages.insert(messages.begin(), {{"role", "system"}, {"content", flags.system}});
  batch_prompt.prompt = prompts.encode_messages(messages, where);
  return batch_prompt;
}

// Reads and checks all lines before the first one is computed, so that a fault in the last line costs no time.
std::vector<BatchPrompt> read_batch_prompts(const GenerateFlags& flags, const GenerationOptions& options,
                                            const ModelConfig& config, const Prompts& prompts) {
  const auto text = flags.batch == "-" ? read_standard_input("[generate] --batch -", kMostPromptBytes)
                                       : read_file(flags.batch, kMostBytes);
  std::vector<BatchPrompt> batch_prompts;
  size_t number = 0;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const auto line = std::string_view(text).substr(begin, end - begin);
    begin = end + 1;
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    const auto where = fmt::format("[generate] {}:{}", flags.batch == "-" ? "standard input" : flags.batch, number);
    batch_prompts.push_back(parse_batch_line(line, where, flags, prompts));
    try {
      generation_capacity(config, batch_prompts.back().prompt, options);
    } catch (const Error& error) {
      raise(ErrorKind::kFormat, "{}: {}", where, error.what());
    }
  }
  return batch_prompts;
}

// The callback of the request stores tokens, text and the reason of the end in `result`, which must stay at its
// address.
GenerationRequest request_of(BatchResult& result, const GenerationOptions& options) {
  return {.prompt = result.batch_prompt->prompt, .options = options, .on_token = [&result](const NewToken& made) {
            if (made.finish == Finish::kError) {
              result.error = made.error;
              result.done = true;
              return false;
            }
            result.tokens.push_back(made.token);
            result.text += result.stream.push(made.token);
            if (made.finish == Finish::kLength && !result.stream.stopped()) result.finish = "length";
            result.done = made.finish || result.stream.stopped();
            return !result.done;
          }};
}

void print_result(BatchResult& result) {
  if (result.error) throw Error(*result.error);
  Json object = Json::object();
  if (!result.batch_prompt->id.is_null()) object["id"] = result.batch_prompt->id;
  object.update(generation_object(result.batch_prompt->prompt, result.tokens, result.text + result.stream.finish()));
  object["finish_reason"] = result.finish;
  print_object(object);
}

}  // namespace

void run_batch(Generator& generator, const GenerateFlags& flags, const GenerationOptions& options,
               const Prompts& prompts) {
  const auto config = ModelConfig::from_folder(flags.model);
  const auto batch_prompts = read_batch_prompts(flags, options, config, prompts);
  // Answers that are not printed yet, in the order of the lines. A deque keeps the addresses of its other elements when
  // one is added at the end or removed at the front, so the references in the callbacks stay valid. Sequences may end
  // in any order; an answer is printed when all answers before it are.
  std::deque<BatchResult> results;
  size_t next = 0;
  auto& engine = generator.engine();
  // A new sequence is added to the engine for each answer that was printed. `results` never has more than kMaxSequences
  // entries, including answers that are complete and wait for an earlier line, so memory is bounded.
  while (next < batch_prompts.size() || !results.empty()) {
    while (next < batch_prompts.size() && results.size() < kMaxSequences) {
      auto& result = results.emplace_back(
          BatchResult{&batch_prompts[next++], TextStream(prompts.tokenizer(), flags.stop, options.stop_tokens)});
      engine.add(request_of(result, prompts.sequence_options(options)));
    }
    engine.step();
    for (; !results.empty() && results.front().done; results.pop_front()) print_result(results.front());
  }
}

}  // namespace tessera::cli
