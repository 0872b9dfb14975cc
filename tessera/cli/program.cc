#include <algorithm>
#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/files/mapped_file.h"
#include "tessera/base/text/nearest.h"
#include "tessera/base/text/quote.h"
#include "tessera/base/version.h"
#include "tessera/cli/verbs.h"
#include "tessera/comm/errors/error_report.h"

namespace tessera::cli {
namespace {

void print_help(std::FILE* to) {
  std::string text =
      "Trains and fine-tunes Hugging Face language models across processes.\n\n"
      "Usage: tessera VERB [FLAGS]\n";
  std::string_view group;
  for (const auto& verb : verbs()) {
    if (group != verb.group) text += fmt::format("\n{}:\n", group = verb.group);
    text += fmt::format("  {:<10} {}\n", verb.name, verb.help);
  }
  text +=
      "\nEvery verb:\n"
      "  --help              description and flags of the verb\n"
      "  --log-level LEVEL   debug, info (default), warning, error or off\n"
      "  --nproc N           local ranks to start, on verbs that run a model\n"
      "\n"
      "Results go to stdout, logs and progress to stderr; NO_COLOR is honoured. Under torchrun, srun or mpirun a\n"
      "verb joins that world instead of starting ranks.\n"
      "Exit codes: 0 ok, 1 run failed, 2 usage or recipe, 3 data or format, 4 communication or timeout,\n"
      "5 out of memory, 128+n signal n.\n"
      "\n"
      "First steps:\n"
      "  tessera doctor                                                check this machine\n"
      "  tessera train recipes/demo.yaml --nproc 2                     fine-tune over two processes\n"
      "  tessera generate --model DIR --prompt 'Once upon a time'      try a model\n";
  std::fputs(text.c_str(), to);
}

// Prints only the first line of the message: what() of libtorch's exceptions also holds a backtrace.
void print_error(std::string_view message) {
  const std::string line = fmt::format("tessera: error: {}\n", first_line(message));
  std::fputs(line.c_str(), stderr);
}

int run_verb(VerbArguments args) {
  if (args.empty()) {
    print_help(stderr);
    return 2;
  }
  const std::string& name = args.front();
  if (name == "--help" || name == "-h" || name == "help") {
    print_help(stdout);
    return 0;
  }
  if (name == "--version" || name == "version") {
    std::printf("tessera %s\n", version());
    return 0;
  }
  const Verb* verb = find_verb(name);
  if (!verb) {
    std::vector<std::string_view> names;
    for (const auto& known : verbs()) names.push_back(known.name);
    const auto closest = nearest(name, names);
    const bool near = edit_distance(name, closest) <= std::max<size_t>(2, name.size() / 3);
    raise(ErrorKind::kConfig, "[tessera] unknown verb {}.{} See 'tessera --help'.", quote(name, 40),
          near ? fmt::format(" Did you mean '{}'?", closest) : "");
  }
  return verb->run(args.subspan(1));
}

// If our launcher started this rank, report_error() writes the message to a file for the launcher, which prints only
// the first failure of all ranks. Otherwise the message is printed here.
int report_failure(const std::exception& error) {
  std::fflush(stdout);
  if (!comm::report_error(error)) print_error(error.what());
  return exit_code_for(error);
}

}  // namespace

std::string message_of(const std::exception& error) {
  if (!dynamic_cast<const std::bad_alloc*>(&error)) return error.what();
  return "[tessera] out of memory: an allocation failed. Use smaller batches or sequences, or more ranks.";
}

// The only place where exceptions become exit codes. bad_alloc is caught apart, because its what() names no remedy. An
// unknown exception (none of std::exception) ends with code 1.
int run_program(VerbArguments args) noexcept {
  int code = 1;
  report_cut_files();
  try {
    code = run_verb(args);
    // A result that could not be written (full disk) is a failure, although the verb succeeded.
    TESSERA_CHECK(std::fflush(stdout) == 0 && !std::ferror(stdout), ErrorKind::kIo,
                  "[tessera] standard output: cannot be written. Is the disk full?");
  } catch (const std::bad_alloc& error) {
    // The bad_alloc becomes an Error kMemory with the text of message_of(). report_failure() passes the Error on to the
    // launcher, if there is one, which then shows this text and this exit code, too.
    code = report_failure(Error(ErrorKind::kMemory, message_of(error)));
  } catch (const std::exception& error) {
    code = report_failure(error);
  } catch (...) {
    print_error("[tessera] an unknown kind of exception. This is a defect of tessera.");
  }
  return code;
}

}  // namespace tessera::cli
