// `tessera serve`: completions and chats over HTTP until it is told to end.
#include <signal.h>
#include <sys/stat.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/base/log.h"
#include "tessera/base/machine/listen.h"
#include "tessera/cli/flags.h"
#include "tessera/cli/ranks.h"
#include "tessera/cli/shared_model.h"
#include "tessera/cli/verbs.h"
#include "tessera/comm/rendezvous/device_choice.h"
#include "tessera/comm/rendezvous/world.h"
#include "tessera/kernels/linear/row_product.h"
#include "tessera/models/config/end_tokens.h"
#include "tessera/models/files/model_path.h"
#include "tessera/models/generation/shared_steps.h"
#include "tessera/serve/server.h"

namespace tessera::cli {
namespace {

struct ServeFlags {
  std::string model, path, name, host = "127.0.0.1", token_file, dtype, device = "auto";
  int port = 8000;
  int64_t nproc = 1;
  int64_t cache_tokens = 0, prompt_block = 256, context_tokens = 0;
  serve::Limits limits;
};

std::optional<int> read_flags(VerbArguments args, ServeFlags& flags) {
  constexpr int64_t kMany = int64_t{1} << 40;
  const auto app = make_app("serve");
  add_model_flags(*app, flags.model, flags.device, /*positional=*/true);
  app->add_option("--name", flags.name,
                  "What clients call the model, besides the MODEL that is given here (default: its last part)");
  app->add_option("--host", flags.host, "Address to listen at; beyond this host with --token-file alone")
      ->capture_default_str();
  app->add_option("--port", flags.port, "Port to listen at; 0: a free one, which is logged")
      ->capture_default_str()
      ->check(CLI::Range(0, 65535));
  app->add_option("--token-file", flags.token_file,
                  "File with the token, 16 to 4096 characters, that clients send as 'Authorization: Bearer TOKEN'");
  add_row_dtype_flag(*app, flags.dtype);
  app->add_option(
         "--cache-tokens", flags.cache_tokens,
         "Tokens whose keys and values are kept (default: 8 contexts; on the CPU within a quarter of the memory that "
         "the machine and its control groups allow and three quarters of what is free, on an accelerator within three "
         "quarters of what is free)")
      ->check(CLI::Range(int64_t{16}, kMany));
  add_context_flag(*app, flags.context_tokens);
  app->add_option("--prompt-block", flags.prompt_block, "Tokens of prompts that are computed in one step")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{1}, int64_t{65536}));
  app->add_option("--nproc", flags.nproc, "Local ranks to start, which hold the model together; the first one serves")
      ->option_text("N");
  auto& limits = flags.limits;
  const auto limit = [&](const char* name, auto& value, const char* help, double most) {
    app->add_option(name, value, help)->capture_default_str()->check(CLI::Range(1.0, most))->group("Limits");
  };
  limit("--max-sequences", limits.sequences, "Choices (n of a request) that are computed together", 65536);
  limit("--max-queue", limits.queue, "Choices that wait beside them; a request whose choices are more gets 503", 65536);
  limit("--max-choices", limits.choices, "Prompts of a request times its n", 65536);
  limit(
      "--max-connections", limits.connections,
      "Connections that are open at once; silent ones are shut for new ones, up to twice as many where none is silent",
      65536);
  limit("--max-connections-per-address", limits.address_connections,
        "The same of one address (/64 of IPv6), beyond which they are refused; loopback has no limit of its own",
        65536);
  limit("--max-body", limits.body_bytes, "Bytes of a request's body; more get 413", 1 << 30);
  limit("--max-header", limits.header_bytes, "Bytes of a request's header; more get 431 or are cut off", 1 << 20);
  limit("--header-seconds", limits.header_seconds, "For the header of a connection's first request to arrive", 86400);
  limit("--read-seconds", limits.read_seconds,
        "For a request's body to arrive, for idle connections, and to take an answer that is made", 86400);
  limit("--request-seconds", limits.request_seconds,
        "From a request to its last token; then the answer ends as \"length\", or with 504 where no token was made",
        86400);
  limit("--drain-seconds", limits.drain_seconds, "After SIGTERM, for requests that are being answered", 86400);
  app->footer(
      "Requests are limited by the model's context, too; 16 stop strings of 1024 bytes, 20 top log-probs, JSON 64 "
      "levels deep.\n"
      "What a request leaves open is as generation_config.json says where that has do_sample: true, else as OpenAI has "
      "it:\n"
      "temperature 1, all tokens; temperature 0 is greedy. Paths: /v1/chat/completions, /v1/completions, /v1/models, "
      "/health.\n"
      "Without a token this host alone can call. Beyond this host put a proxy with TLS in front (nginx, Caddy): token "
      "and texts\n"
      "travel in clear here, and a proxy also bounds the connections and the requests of each client.");
  const auto code = parse_flags(*app, args);
  if (code) return code;
  flags.path = flags.model;
  auto folder = flags.model;
  while (folder.size() > 1 && folder.ends_with('/')) folder.pop_back();
  if (flags.name.empty()) flags.name = std::filesystem::path(folder).filename().string();
  flags.model = resolve_model_path(flags.model, "--model");
  return std::nullopt;
}

std::string read_token(const std::string& path) {
  if (path.empty()) return "";
  auto token = read_file(path, 8192);
  while (!token.empty() && std::isspace(static_cast<unsigned char>(token.back()))) token.pop_back();
  const bool printable = std::ranges::all_of(token, [](unsigned char c) { return c > 0x20 && c < 0x7F; });
  TESSERA_CHECK(printable && token.size() >= 16 && token.size() <= 4096, ErrorKind::kConfig,
                "--token-file {}: found {} bytes, wanted one line of 16 to 4096 visible ASCII characters, such as "
                "'openssl rand -hex 32' makes",
                path, token.size());
  struct stat found {};
  if (::stat(path.c_str(), &found) == 0 && (found.st_mode & (S_IRGRP | S_IROTH)) != 0) {
    log_warning("[serve] {}: others can read this token. Run 'chmod 600' on it.", path);
  }
  return token;
}

Listening listen_for(const ServeFlags& flags, const std::string& token) {
  auto listening = listen_at(flags.host, flags.port, Reach::kThisHost);
  TESSERA_CHECK(is_loopback(listening.address) || !token.empty(), ErrorKind::kConfig,
                "--host {}: beyond this host a token is wanted. Give --token-file FILE.", flags.host);
  return listening;
}

// SIGTERM and SIGINT for all threads that begin after it: before serve() they end the process at once, then the first
// ends wait() and the second the process.
class EndSignals {
 public:
  EndSignals() {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
    std::thread([signals, state = state_] {
      int signal = 0;
      ::sigwait(&signals, &signal);
      if (!state->serving) std::_Exit(128 + signal);
      if (!state->ended.exchange(true)) state->first.set_value(signal);
      ::sigwait(&signals, &signal);
      std::_Exit(128 + signal);
    }).detach();
  }
  void serve() { state_->serving = true; }
  // The signal. Throws what end() was given.
  int wait() { return state_->first.get_future().get(); }
  // Ends the wait; only the first call and signal count.
  std::function<void(std::exception_ptr)> end() const {
    return [state = state_](const std::exception_ptr& error) {
      if (!state->ended.exchange(true)) state->first.set_exception(error);
    };
  }

 private:
  struct State {
    std::atomic<bool> serving = false, ended = false;
    std::promise<int> first;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace

int run_serve(VerbArguments args) {
  ServeFlags flags;
  if (const auto code = read_flags(args, flags)) return *code;
  // What is cheap to find wrong comes before the weights.
  const auto token = read_token(flags.token_file);
  serve::Served served{.name = flags.name,
                       .path = flags.path,
                       .config = ModelConfig::from_folder(flags.model),
                       .defaults = {},
                       .tokenizer = text::Tokenizer::from_folder(flags.model),
                       .chat = text::ChatTemplate::from_folder(flags.model),
                       .limits = flags.limits};
  served.defaults = GenerationOptions::from_folder(flags.model, served.config);
  set_context(flags.context_tokens, served.config, served.defaults);
  served.defaults.stop_tokens = end_tokens(flags.model, served.config, served.tokenizer, served.chat);
  if (const auto code = launch_ranks("serve", args, flags.nproc)) return *code;
  EndSignals signals;
  const auto world = join_world({.nproc = static_cast<int>(flags.nproc)});
  const bool first = world->rank() == 0, shared = world->size() > 1;
  std::optional<Listening> listening;
  if (first) {
    listening = listen_for(flags, token);
    warn_of_unlisted_ends(flags.model, served.config, served.tokenizer, served.defaults.stop_tokens);
  }
  const auto device = comm::choose_device(*world, {.setting = flags.device, .key = "--device"});
  const auto model = load_shared(flags.model, flags.dtype, served.config, device, world);
  served.cache_tokens = flags.cache_tokens > 0 ? flags.cache_tokens
                                               : shared_cache_tokens(*model, 8 * served.config.context_tokens, *world);
  if (served.cache_tokens < served.config.context_tokens && first) {
    log_warning("[serve] the cache holds {} tokens, which bounds the context of {}", served.cache_tokens,
                served.config.context_tokens);
  }
  check_shared_cache(*model, served.cache_tokens, *world);
  signals.serve();
  if (!first) {
    follow_steps(*model, *world->group());  // a signal is the first rank's business
    return 0;
  }
  serve::Scheduler scheduler(model,
                             {.pages = Engine::pages_for(served.cache_tokens),
                              .max_sequences = flags.limits.sequences,
                              .prompt_block = flags.prompt_block,
                              .group = engine_group(*world)},
                             flags.limits, shared ? signals.end() : nullptr);
  const bool v6 = listening->address.find(':') != std::string::npos;
  const auto url =
      fmt::format("http://{}{}{}:{}/v1", v6 ? "[" : "", listening->address, v6 ? "]" : "", listening->port);
  serve::Server server(served, scheduler, {.listening = *std::move(listening), .token = token});
  log_info("[serve] {} at {} ({}, {} instructions, a cache of {} tokens{}{})", served.name, url, device.str(),
           kernels::row_kernels_name(), served.cache_tokens, shared ? fmt::format(", {} ranks", world->size()) : "",
           token.empty() ? "" : ", with a token");
  const int signal = signals.wait();
  log_info("[serve] {}: answering what is begun, up to {} s; a second signal ends at once",
           signal == SIGTERM ? "SIGTERM" : "SIGINT", flags.limits.drain_seconds);
  if (!server.drain()) log_warning("[serve] not all requests came to their end in time");
  return 0;
}

}  // namespace tessera::cli
