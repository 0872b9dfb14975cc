// Runs other programs from tests: the Python interpreter of oracle tests, and our own program.
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
  int exit_code = -1;  // 128 + n if signal n ended the process
  std::string out;
  std::string err;
};

struct ProcessOptions {
  std::string input{};                               // written to standard input
  std::map<std::string, std::string> environment{};  // added to this process's environment
  double timeout_seconds = 100;                      // then the stacks of its processes are printed, and SIGKILL: 137
};

// Runs arguments[0] with the other arguments, and waits for its end. The program is looked up on PATH.
ProcessResult run_process(const std::vector<std::string>& arguments, const ProcessOptions& options = {});

// Runs a Python script of the source tree with the oracle interpreter: run_python("tests/text/oracle/x.py", {"a",
// "b"}). If `options` has no environment, the script is a fork of an interpreter that has imported its modules already
// (python_host.py); each test program has one such interpreter.
ProcessResult run_python(const std::string& script, const std::vector<std::string>& arguments,
                         const ProcessOptions& options = {});

std::string program();                  // build/tessera
std::string pretend_program();          // build/tessera_pretend, the program with the pretend device
std::filesystem::path source_folder();  // root of the source tree
// build/assets/NAME. If the asset does not exist, the test fails with the command that fetches it.
std::filesystem::path asset(const std::string& name);

}  // namespace tessera::testing
