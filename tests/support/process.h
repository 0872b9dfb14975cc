// Running other programs from tests: the oracle's Python, and our own program.
//
//   auto run = run_process({program(), "doctor", "--json"});
//   ASSERT_EQ(run.exit_code, 0) << run.err;
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace tessera::testing {

struct ProcessResult {
  int exit_code = -1;  // 128 + n when signal n ended it
  std::string out;
  std::string err;
};

struct ProcessOptions {
  std::string input{};                               // given on standard input
  std::map<std::string, std::string> environment{};  // added to this process's own
  double timeout_seconds = 100;                      // then the stacks of its processes are printed, and SIGKILL: 137
};

// Runs arguments[0] with the rest, waits for its end. The program is looked up on PATH.
ProcessResult run_process(const std::vector<std::string>& arguments, const ProcessOptions& options = {});

// Runs a Python script of the source tree with the oracle interpreter: run_python("tests/text/oracle/x.py", {"a",
// "b"}). Without an environment of its own it is a fork of an interpreter that has its imports (python_host.py), of
// which a test program has one.
ProcessResult run_python(const std::string& script, const std::vector<std::string>& arguments,
                         const ProcessOptions& options = {});

std::string program();                  // build/tessera
std::string pretend_program();          // build/tessera_pretend, which has the pretend device
std::filesystem::path source_folder();  // root of the source tree
// build/assets/NAME; the test fails with the command that fetches it when it is not there.
std::filesystem::path asset(const std::string& name);

}  // namespace tessera::testing
