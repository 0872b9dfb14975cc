// `tessera generate`: continues a prompt, or answers it as a chat message.
#include "tessera/models/generate.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/cli/flags.h"
#include "tessera/cli/ranks.h"
#include "tessera/cli/verbs.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/rendezvous/device_choice.h"
#include "tessera/comm/rendezvous/rendezvous.h"
#include "tessera/comm/rendezvous/world.h"
#include "tessera/models/model_path.h"
#include "tessera/models/weights.h"
#include "tessera/parallel/data_parallel.h"
#include "tessera/text/chat_template.h"
#include "tessera/text/tokenizer.h"

namespace tessera::cli {
namespace {

struct Flags {
  std::string model, prompt, dtype, device = "auto";
  bool chat = false, json = false;
  int64_t nproc = 1;
  // Absent: as generation_config.json says, and greedy when none of the first four is given.
  std::optional<double> temperature, top_p;
  std::optional<int64_t> top_k, max_new_tokens;
  std::optional<uint64_t> seed;
};

std::optional<int> read_flags(VerbArguments args, Flags& flags) {
  const auto app = make_app("generate");
  app->add_option("--model", flags.model, "Hugging Face folder: config.json, safetensors, tokenizer.json")->required();
  app->add_option("--prompt", flags.prompt,
                  "Text to continue, or with --chat the user's message; '-' reads standard input")
      ->required();
  app->add_option("--max-new-tokens", flags.max_new_tokens,
                  "Tokens to make at most (default: generation_config.json, else 128)");
  app->add_option("--temperature", flags.temperature, "Sample at this temperature; 0: greedy (default: greedy)");
  app->add_option("--top-k", flags.top_k, "Sample from the K likeliest tokens; 0: from all");
  app->add_option("--top-p", flags.top_p, "Sample from the likeliest tokens that reach this probability together");
  app->add_option("--seed", flags.seed, "Sample with this seed; the same seed gives the same text (default: 0)");
  app->add_flag("--chat", flags.chat, "Put the prompt into the model's chat template");
  app->add_flag("--json", flags.json, "One JSON object at the end instead of text: prompt_tokens, tokens, text");
  app->add_option("--dtype", flags.dtype, "float32, bfloat16 or float16 (default: as stored)");
  app->add_option("--device", flags.device, "auto, cpu, cuda, cuda:N or a registered accelerator (default: auto)");
  app->add_option("--nproc", flags.nproc, "Local ranks to start; the model is sharded over them")->option_text("N");
  auto code = parse_flags(*app, args);
  if (!code) flags.model = resolve_model_path(flags.model, "--model");
  return code;
}

std::string read_standard_input() {
  constexpr size_t kMaxBytes = 64 << 20;
  std::string text;
  char buffer[1 << 16];
  while (const size_t got = std::fread(buffer, 1, sizeof buffer, stdin)) {
    text.append(buffer, got);
    TESSERA_CHECK(text.size() <= kMaxBytes, ErrorKind::kConfig, "[generate] --prompt -: more than {} bytes", kMaxBytes);
  }
  return text;
}

GenerationOptions generation_options(const Flags& flags, const ModelConfig& config) {
  auto options = GenerationOptions::from_folder(flags.model, config);
  options.sample = (flags.temperature || flags.top_k || flags.top_p || flags.seed) && flags.temperature != 0.0;
  if (flags.temperature && options.sample) options.temperature = *flags.temperature;
  options.top_k = flags.top_k.value_or(options.top_k);
  options.top_p = flags.top_p.value_or(options.top_p);
  options.seed = flags.seed.value_or(options.seed);
  options.max_new_tokens = flags.max_new_tokens.value_or(options.max_new_tokens);
  options.check();
  return options;
}

// The prompt's text. Standard input belongs to the first rank. COLLECTIVE over the world.
std::string prompt_text(const Flags& flags, comm::World& world) {
  if (flags.prompt != "-") return flags.prompt;
  const auto own = world.rank() == 0 ? read_standard_input() : "";
  return world.size() == 1 ? own : comm::broadcast_bytes(*world.group(), own);
}

// The ids that the model reads, with special tokens where the tokenizer or the template puts them.
std::vector<int64_t> prompt_ids(const Flags& flags, const text::Tokenizer& tokenizer, std::string prompt) {
  text::EncodeOptions options;
  if (flags.chat) {
    const auto chat = text::ChatTemplate::from_folder(flags.model);
    TESSERA_CHECK(chat, ErrorKind::kConfig, "[generate] {}: holds no chat template. Leave out --chat.", flags.model);
    const nlohmann::ordered_json messages = {{{"role", "user"}, {"content", prompt}}};
    prompt = chat->render(messages, /*add_generation_prompt=*/true).text;
    options.add_special_tokens = false;
  }
  const auto ids = tokenizer.encode(prompt, options);
  return {ids.begin(), ids.end()};
}

void write_piece(const std::string& piece) {
  std::fwrite(piece.data(), 1, piece.size(), stdout);
  std::fflush(stdout);
}

// The model of the folder, whole, or sharded over the world. COLLECTIVE over the world.
std::shared_ptr<CausalLM> load_model(const Flags& flags, const ModelConfig& config,
                                     std::optional<c10::ScalarType> dtype, const std::shared_ptr<comm::World>& world) {
  const auto device = comm::choose_device(*world, {.setting = flags.device, .key = "--device"});
  if (world->size() == 1) return from_pretrained(flags.model, dtype, device);
  auto model = make_model(config, {.dtype = dtype.value_or(config.dtype.value_or(at::kFloat)), .device = at::kMeta});
  std::vector<nn::Module*> blocks;
  for (const auto& block : model->blocks()) blocks.push_back(block.get());
  const auto type = c10::DeviceTypeName(device.type(), /*lower_case=*/true);
  const auto mesh = init_device_mesh(world, type, {world->size()}, {"dp_shard"});
  fully_shard_blocks(*model, blocks, {.mesh = mesh});
  to_empty(*model, device);
  load_pretrained(*model, flags.model);
  return model;
}

void stream_text(CausalLM& model, const text::Tokenizer& tokenizer, const std::vector<int64_t>& prompt,
                 const GenerationOptions& options, comm::World& world) {
  if (world.rank() > 0) {
    generate(model, prompt, options, {}, world.group().get());
    return;
  }
  text::StreamDecoder decoder(tokenizer);
  generate(
      model, prompt, options,
      [&](int64_t token) {
        write_piece(decoder.push(static_cast<text::TokenId>(token)));
        return std::ferror(stdout) == 0;  // nobody reads any more
      },
      world.group().get());
  write_piece(decoder.finish() + "\n");
}

void print_json(CausalLM& model, const text::Tokenizer& tokenizer, const std::vector<int64_t>& prompt,
                const GenerationOptions& options, comm::World& world) {
  const auto tokens = generate(model, prompt, options, {}, world.group().get());
  if (world.rank() > 0) return;
  const std::vector<text::TokenId> ids(tokens.begin(), tokens.end());
  const nlohmann::ordered_json object = {
      {"prompt_tokens", prompt}, {"tokens", tokens}, {"text", tokenizer.decode(ids)}};
  std::printf("%s\n", object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
}

}  // namespace

int run_generate(VerbArguments args) {
  Flags flags;
  if (const auto code = read_flags(args, flags)) return *code;
  const auto dtype = parse_dtype_flag("generate", flags.dtype);
  // What is cheap to find wrong comes before the weights.
  const auto config = ModelConfig::from_folder(flags.model);
  const auto options = generation_options(flags, config);
  if (const auto code = launch_ranks("generate", args, flags.nproc)) return *code;
  const bool alone = comm::who_started(comm::process_environment()) == "single";
  const auto world = alone ? comm::World::single() : connect_world({.nproc = flags.nproc});
  const auto tokenizer = text::Tokenizer::from_folder(flags.model);
  const auto prompt = prompt_ids(flags, tokenizer, prompt_text(flags, *world));
  const auto model = load_model(flags, config, dtype, world);
  (flags.json ? print_json : stream_text)(*model, tokenizer, prompt, options, *world);
  return 0;
}

}  // namespace tessera::cli
