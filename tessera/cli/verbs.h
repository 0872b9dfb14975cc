// The verbs of the program: one table; each verb has one function and one file.
//
//   int run_doctor(std::span<const std::string> args) {           // tessera/cli/doctor.cc
//     auto app = make_app("doctor");                              // flags.h: --help and --log-level are in it
//     bool json = false;
//     app->add_flag("--json", json, "One JSON object instead of lines");
//     if (const auto code = parse_flags(*app, args)) return *code;  // --help was given and is printed
//     ...
//     return 0;
//   }
//
// A verb returns the exit code of the program or throws. run_program() prints an exception as one line on stderr and
// returns its exit code. Results go to stdout, logs and progress to stderr. `args` excludes the program and the verb.
#pragma once

#include <exception>
#include <span>
#include <string>
#include <string_view>

namespace tessera::cli {

using VerbArguments = std::span<const std::string>;

struct Verb {
  const char* name;
  const char* group;  // the heading of the verb in `tessera --help`
  const char* help;   // one line
  int (*run)(VerbArguments args);
};

// All verbs, in the order in which `tessera --help` lists them.
std::span<const Verb> verbs();
// Returns the verb with this name; null when there is none.
const Verb* find_verb(std::string_view name);

// The message about an exception that ended the program. For std::bad_alloc, whose what() is of no help, the message
// says what to do.
std::string message_of(const std::exception& error);

// Runs the program for main(). `args` excludes the program's name. Returns the exit code; never throws.
int run_program(VerbArguments args) noexcept;

int run_train(VerbArguments args);
int run_generate(VerbArguments args);
int run_serve(VerbArguments args);
int run_score(VerbArguments args);
int run_report(VerbArguments args);
int run_ckpt(VerbArguments args);
int run_launch(VerbArguments args);
int run_trace(VerbArguments args);
int run_tokenize(VerbArguments args);
int run_doctor(VerbArguments args);

}  // namespace tessera::cli
