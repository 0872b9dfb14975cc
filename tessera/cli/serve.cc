// `tessera serve`: serves completions and chats over HTTP until SIGTERM or SIGINT.
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
#include "tessera/cli/sharded_model.h"
#include "tessera/cli/verbs.h"
#include "tessera/comm/rendezvous/device_choice.h"
#include "tessera/comm/rendezvous/world.h"
#include "tessera/kernels/linear/batch_invariant_linear.h"
#include "tessera/models/config/end_tokens.h"
#include "tessera/models/files/model_path.h"
#include "tessera/models/generation/engine_follower.h"
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
                  "Model name for clients, who may also use the MODEL given here (default: the last part of MODEL)");
  app->add_option("--host", flags.host, "Address to listen on; other than loopback only with --token-file")
      ->capture_default_str();
  app->add_option("--port", flags.port, "Port to listen on; 0: a free port, which is logged")
      ->capture_default_str()
      ->check(CLI::Range(0, 65535));
  app->add_option("--token-file", flags.token_file,
                  "File with a token of 16 to 4096 characters, which clients send as 'Authorization: Bearer TOKEN'");
  add_row_dtype_flag(*app, flags.dtype);
  app->add_option(
         "--cache-tokens", flags.cache_tokens,
         "Size of the KV cache in tokens (default: 8 contexts; on the CPU at most a quarter of the memory that the "
         "machine and its control groups allow and three quarters of the free memory, on an accelerator at most three "
         "quarters of the free memory)")
      ->check(CLI::Range(int64_t{16}, kMany));
  add_context_flag(*app, flags.context_tokens);
  app->add_option("--prompt-block", flags.prompt_block, "Prompt tokens that are computed in one step (chunked prefill)")
      ->capture_default_str()
      ->check(CLI::Range(int64_t{1}, int64_t{65536}));
  app->add_option("--nproc", flags.nproc, "Local ranks to start; the model is sharded over them, and rank 0 serves")
      ->option_text("N");
  auto& limits = flags.limits;
  const auto limit = [&](const char* name, auto& value, const char* help, double maximum) {
    app->add_option(name, value, help)->capture_default_str()->check(CLI::Range(1.0, maximum))->group("Limits");
  };
  limit("--max-sequences", limits.sequences, "Sequences (choices of requests) that are computed together", 65536);
  limit("--max-queue", limits.queue,
        "Sequences that may wait in addition; a request with more sequences than fit gets status 503", 65536);
  limit("--max-choices", limits.choices, "Sequences of one request: its prompts times its n", 65536);
  limit("--max-connections", limits.connections,
        "Open connections; a new one closes an idle one, and where none is idle, up to twice as many may be open",
        65536);
  limit("--max-connections-per-address", limits.address_connections,
        "Open connections of one address (/64 of IPv6); more are refused; loopback has no such limit", 65536);
  limit("--max-body", limits.body_bytes, "Bytes of a request body; a larger one gets status 413", 1 << 30);
  limit("--max-header", limits.header_bytes,
        "Bytes of a request header; a larger one gets status 431 or its connection is closed", 1 << 20);
  limit("--header-seconds", limits.header_seconds, "Seconds for the header of a connection's first request to arrive",
        86400);
  limit("--read-seconds", limits.read_seconds,
        "Seconds for a request body to arrive, for an idle connection, and for a client to read an answer", 86400);
  limit("--request-seconds", limits.request_seconds,
        "Seconds from a request to its last token; the answer then ends with \"length\", or with status 504 if it has "
        "no token yet",
        86400);
  limit("--drain-seconds", limits.drain_seconds, "Seconds after SIGTERM for requests that are being answered", 86400);
  app->footer(
      "Further limits of a request: the context of the model, 16 stop strings of 1024 bytes, 20 top log-probs, JSON 64 "
      "levels\n"
      "deep. Sampling settings that a request leaves out come from generation_config.json if it has do_sample: true; "
      "else\n"
      "they are OpenAI's: temperature 1, all tokens. Temperature 0 is greedy. Paths: /v1/chat/completions, "
      "/v1/completions,\n"
      "/v1/models, /health. Without a token only this host can connect. For other hosts put a proxy with TLS in front "
      "(nginx,\n"
      "Caddy): this server sends token and texts unencrypted, and a proxy can also limit connections and requests per "
      "client.");
  const auto code = parse_flags(*app, args);
  if (code) return code;
  // `path` is MODEL as given, `name` its last part; clients may use both as the model's name.
  flags.path = flags.model;
  auto folder = flags.model;
  while (folder.size() > 1 && folder.ends_with('/')) folder.pop_back();
  if (flags.name.empty()) flags.name = std::filesystem::path(folder).filename().string();
  flags.model = resolve_model_path(flags.model, "--model");
  return std::nullopt;
}

// Reads the server's access token from the file and removes trailing white space. Returns an empty text without a path.
// Warns if other users can read the file.
std::string read_token(const std::string& path) {
  if (path.empty()) return "";
  auto token = read_file(path, 8192);
  while (!token.empty() && std::isspace(static_cast<unsigned char>(token.back()))) token.pop_back();
  const bool printable = std::ranges::all_of(token, [](unsigned char c) { return c > 0x20 && c < 0x7F; });
  TESSERA_CHECK(printable && token.size() >= 16 && token.size() <= 4096, ErrorKind::kConfig,
                "--token-file {}: found {} bytes, wanted one line of 16 to 4096 visible ASCII characters. "
                "'openssl rand -hex 32' makes such a token.",
                path, token.size());
  struct stat found {};
  if (::stat(path.c_str(), &found) == 0 && (found.st_mode & (S_IRGRP | S_IROTH)) != 0) {
    log_warning("[serve] {}: other users can read this token. Run 'chmod 600' on the file.", path);
  }
  return token;
}

ListeningSocket listen_for(const ServeFlags& flags, const std::string& token) {
  auto listening = listen_at(flags.host, flags.port, ListenScope::kThisHost);
  TESSERA_CHECK(is_loopback(listening.address) || !token.empty(), ErrorKind::kConfig,
                "--host {}: an address other than loopback needs a token. Add --token-file FILE.", flags.host);
  return listening;
}

// Handles SIGTERM and SIGINT on a thread of its own. Before serve() a signal ends the process at once. After serve()
// the first signal ends wait(), and a second one ends the process. The constructor blocks the signals, and threads
// inherit this mask; so the object must be created before other threads.
class ShutdownSignals {
 public:
  ShutdownSignals() {
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
  // Waits for the first signal and returns its number, or throws the error that was passed to end().
  int wait() { return state_->first.get_future().get(); }
  // Returns a function that ends wait() with an error. The function has no effect if a signal or an earlier call of
  // such a function has ended wait() already.
  std::function<void(std::exception_ptr)> end() const {
    return [state = state_](const std::exception_ptr& error) {
      if (!state->ended.exchange(true)) state->first.set_exception(error);
    };
  }

 private:
  struct SharedState {
    std::atomic<bool> serving = false, ended = false;
    std::promise<int> first;
  };
  std::shared_ptr<SharedState> state_ = std::make_shared<SharedState>();
};

}  // namespace

int run_serve(VerbArguments args) {
  ServeFlags flags;
  if (const auto code = read_flags(args, flags)) return *code;
  // Flags, config and other small inputs are read and checked here, so that an error in them ends the process before
  // ranks start and weights are loaded.
  const auto token = read_token(flags.token_file);
  serve::ServedModel served{.name = flags.name,
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
  // ShutdownSignals blocks the signals in this thread, and a new thread inherits the blocked signals. join_world() and
  // the model start threads, so ShutdownSignals is created before both.
  ShutdownSignals signals;
  const auto world = join_world({.nproc = static_cast<int>(flags.nproc)});
  const bool first = world->rank() == 0, shared = world->size() > 1;
  std::optional<ListeningSocket> listening;
  if (first) {
    listening = listen_for(flags, token);
    warn_of_unlisted_ends(flags.model, served.config, served.tokenizer, served.defaults.stop_tokens);
  }
  const auto device = comm::choose_device(*world, {.setting = flags.device, .key = "--device"});
  const auto model = load_sharded_model(flags.model, flags.dtype, served.config, device, world);
  served.cache_tokens = flags.cache_tokens > 0 ? flags.cache_tokens
                                               : shared_cache_tokens(*model, 8 * served.config.context_tokens, *world);
  // A sequence cannot be longer than the KV cache, so a cache with fewer tokens than the model's context limits the
  // context.
  if (served.cache_tokens < served.config.context_tokens && first) {
    log_warning("[serve] the KV cache holds {} tokens, which limits the context of {} tokens", served.cache_tokens,
                served.config.context_tokens);
  }
  check_shared_cache(*model, served.cache_tokens, *world);
  signals.serve();
  if (!first) {
    run_engine_follower(*model, *world->group());  // until rank 0 ends; rank 0 handles the signals
    return 0;
  }
  // If another rank dies, the scheduler passes the error to the function that signals.end() returned. Then
  // signals.wait() throws the error, so that the server does not wait for ever.
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
           kernels::vector_level_name(), served.cache_tokens, shared ? fmt::format(", {} ranks", world->size()) : "",
           token.empty() ? "" : ", with a token");
  const int signal = signals.wait();
  log_info("[serve] {}: finishing running requests for up to {} s; a second signal ends at once",
           signal == SIGTERM ? "SIGTERM" : "SIGINT", flags.limits.drain_seconds);
  if (!server.drain()) log_warning("[serve] not all requests were finished in time");
  return 0;
}

}  // namespace tessera::cli
