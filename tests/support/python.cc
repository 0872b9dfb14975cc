// run_python(): the interpreter that scripts are forks of.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>

#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera::testing {
namespace {

std::string interpreter() {
  const char* value = std::getenv("TESSERA_PYTHON");
  if (!value) throw std::runtime_error("TESSERA_PYTHON is not set: run the tests through ctest or './dev test'");
  return value;
}

std::string text_of(const std::filesystem::path& file) {
  std::ostringstream text;
  text << std::ifstream(file, std::ios::binary).rdbuf();
  return text.str();
}

// Ends with the program, or when that has ended.
class PythonHost {
 public:
  PythonHost() {
    int in[2], out[2];
    if (::pipe2(in, O_CLOEXEC) || ::pipe2(out, O_CLOEXEC)) throw std::runtime_error("pipe2 failed");
    const std::string python = interpreter(), script = (source_folder() / "tests/support/python_host.py").string();
    child_ = ::fork();
    if (child_ < 0) throw std::runtime_error("fork failed");
    if (child_ == 0) {
      ::dup2(in[0], 0);
      ::dup2(out[1], 1);
      ::execl(python.c_str(), python.c_str(), script.c_str(), nullptr);
      ::_exit(127);
    }
    ::close(in[0]);
    ::close(out[1]);
    requests_ = ::fdopen(in[1], "w");
    answers_ = ::fdopen(out[0], "r");
  }
  ~PythonHost() {
    std::fclose(requests_);
    std::fclose(answers_);
    ::waitpid(child_, nullptr, 0);
  }
  PythonHost(const PythonHost&) = delete;
  PythonHost& operator=(const PythonHost&) = delete;

  ProcessResult run(const std::string& script, const std::vector<std::string>& arguments,
                    const ProcessOptions& options) {
    const std::lock_guard lock(mutex_);
    const TempFolder folder;
    const auto in = folder / "in", out = folder / "out", err = folder / "err";
    std::ofstream(in, std::ios::binary) << options.input;
    std::ofstream{out}, std::ofstream{err};
    const nlohmann::json request = {{"script", script},     {"arguments", arguments},
                                    {"input", in.string()}, {"out", out.string()},
                                    {"err", err.string()},  {"seconds", options.timeout_seconds}};
    std::fprintf(requests_, "%s\n", request.dump().c_str());
    std::fflush(requests_);
    int code = -1;
    if (std::fscanf(answers_, "%d", &code) != 1) throw std::runtime_error("python_host.py has ended: " + script);
    return {code, text_of(out), text_of(err)};
  }

 private:
  std::mutex mutex_;
  pid_t child_ = -1;
  std::FILE* requests_ = nullptr;
  std::FILE* answers_ = nullptr;
};

}  // namespace

ProcessResult run_python(const std::string& script, const std::vector<std::string>& arguments,
                         const ProcessOptions& options) {
  const std::string path = (source_folder() / script).string();
  if (options.environment.empty()) {
    static PythonHost host;
    return host.run(path, arguments, options);
  }
  std::vector<std::string> all = {interpreter(), path};
  all.insert(all.end(), arguments.begin(), arguments.end());
  return run_process(all, options);
}

}  // namespace tessera::testing
