// `tessera generate --chat` without a prompt: an interactive chat.
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/cli/generate/generate_flags.h"
#include "tessera/cli/generate/generator.h"
#include "tessera/models/generation/text_stream.h"

namespace tessera::cli {
namespace {

volatile sig_atomic_t interrupted = 0;

// While an object exists, Ctrl-C sets `interrupted`, and a system call that waits returns with EINTR, because the
// handler is installed without SA_RESTART.
class CatchInterrupt {
 public:
  CatchInterrupt() {
    struct sigaction action {};
    action.sa_handler = [](int) { interrupted = 1; };
    ::sigaction(SIGINT, &action, &before_);
  }
  ~CatchInterrupt() { ::sigaction(SIGINT, &before_, nullptr); }
  CatchInterrupt(const CatchInterrupt&) = delete;
  CatchInterrupt& operator=(const CatchInterrupt&) = delete;

 private:
  struct sigaction before_ {};
};

// Reads lines of standard input with read(2), because std::getline would continue after a signal.
class StdinLines {
 public:
  // Returns false at the end of the input. A line that Ctrl-C interrupted is empty. Error kConfig for a line above 1
  // MiB.
  bool next(std::string& line) {
    constexpr size_t kMostBytes = 1 << 20;
    while (true) {
      if (const auto end = held_.find('\n'); end != std::string::npos) {
        line = held_.substr(0, end);
        held_.erase(0, end + 1);
        return true;
      }
      TESSERA_CHECK(held_.size() <= kMostBytes, ErrorKind::kConfig, "[generate] a line of more than {} bytes",
                    kMostBytes);
      char buffer[4096];
      const auto got = ::read(STDIN_FILENO, buffer, sizeof buffer);
      if (got > 0) {
        held_.append(buffer, static_cast<size_t>(got));
      } else if (got < 0 && errno == EINTR) {  // Ctrl-C drops the line so far; other signals are ignored
        if (!interrupted) continue;
        interrupted = 0;
        held_.clear();
        line.clear();
        return true;
      } else {
        line = std::exchange(held_, "");
        return !line.empty();
      }
    }
  }

 private:
  std::string held_;
};

void show(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

// Generates and prints the model's answer to the messages, until its end or Ctrl-C. Returns the text.
std::string answer(Generator& generator, const GenerateFlags& flags, const GenerationOptions& options,
                   const Prompts& prompts, const Json& messages) {
  TextStream stream(prompts.tokenizer(), flags.stop, options.stop_tokens);
  std::string text;
  const auto prompt = prompts.encode_messages(messages, "[generate] the conversation");
  const auto put = [&](const std::string& piece) {
    text += piece;
    write_text(piece);
  };
  interrupted = 0;
  generator.run({.prompt = prompt, .options = prompts.sequence_options(options), .on_token = [&](const NewToken& made) {
                   put(stream.push(made.token));
                   return !stream.stopped() && !interrupted && std::ferror(stdout) == 0;
                 }});
  put(stream.finish());
  show(std::exchange(interrupted, 0) ? " ...\n" : "\n");
  return text;
}

}  // namespace

void run_chat(Generator& generator, const GenerateFlags& flags, const GenerationOptions& options,
              const Prompts& prompts) {
  const CatchInterrupt catch_interrupt;
  const bool typed = ::isatty(STDIN_FILENO) != 0;
  StdinLines lines;
  auto messages = opening_messages(flags);
  std::string line;
  if (typed) show("/clear forgets the conversation, /exit or Ctrl-D ends the chat, Ctrl-C ends an answer\n");
  while (std::ferror(stdout) == 0) {
    if (typed) show("> ");
    if (!lines.next(line)) break;
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (line == "/exit") return;
    if (line == "/clear") {
      messages = opening_messages(flags);
      continue;
    }
    if (line.find_first_not_of(" \t") == std::string::npos) {
      if (typed && line.empty()) show("\n");
      continue;
    }
    messages.push_back({{"role", "user"}, {"content", line}});
    try {
      const auto said = answer(generator, flags, options, prompts, messages);
      messages.push_back({{"role", "assistant"}, {"content", said}});
    } catch (const Error& error) {
      // Errors kConfig and kFormat come from the user's message: for example, the conversation has become longer than
      // the context, or the template refuses the message. The chat continues without this message.
      if (error.kind() != ErrorKind::kConfig && error.kind() != ErrorKind::kFormat) throw;
      log_error("{} The last message is dropped; /clear forgets the conversation.", error.what());
      messages.erase(messages.size() - 1);
    }
  }
  if (typed) show("\n");
}

}  // namespace tessera::cli
