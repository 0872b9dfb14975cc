// run_python(): the interpreter whose forks run the scripts, either one for this program or one for all tests.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>

#include "tests/support/hosts/host_client.h"
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

std::string host_script() { return (source_folder() / "tests/support/python_host.py").string(); }

// An interpreter that receives requests and sends answers over two streams.
class PythonHost {
 public:
  virtual ~PythonHost() = default;
  PythonHost() = default;
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
    const int code = ask(request.dump() + "\n", script);
    return {code, text_of(out), text_of(err)};
  }

 private:
  virtual int ask(const std::string& request, const std::string& script) = 0;
  std::mutex mutex_;
};

int code_of(std::FILE* answers, const std::string& script) {
  int code = -1;
  if (std::fscanf(answers, "%d", &code) != 1) throw std::runtime_error("python_host.py has ended: " + script);
  return code;
}

// Its interpreter ends with this program.
class OwnPythonHost final : public PythonHost {
 public:
  OwnPythonHost() {
    int in[2], out[2];
    if (::pipe2(in, O_CLOEXEC) || ::pipe2(out, O_CLOEXEC)) throw std::runtime_error("pipe2 failed");
    const std::string python = interpreter(), script = host_script();
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
  ~OwnPythonHost() override {
    std::fclose(requests_);
    std::fclose(answers_);
    ::waitpid(child_, nullptr, 0);
  }

 private:
  int ask(const std::string& request, const std::string& script) override {
    std::fputs(request.c_str(), requests_);
    std::fflush(requests_);
    return code_of(answers_, script);
  }

  pid_t child_ = -1;
  std::FILE* requests_ = nullptr;
  std::FILE* answers_ = nullptr;
};

// The interpreter of all tests (hosts/host_client.h).
class SharedPythonHost final : public PythonHost {
 public:
  explicit SharedPythonHost(const std::string& folder) : name_(folder + "/python") {}

 private:
  int ask(const std::string& request, const std::string& script) override {
    const int socket = reach_host(name_, [&] {
      const std::string python = interpreter(), host = host_script(), path = name_ + ".socket";
      ::execl(python.c_str(), python.c_str(), host.c_str(), path.c_str(), nullptr);
    });
    if (socket < 0) throw std::runtime_error("no python_host.py at " + name_ + ".socket");
    std::FILE* stream = ::fdopen(socket, "r+");
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> closes(stream, std::fclose);
    std::fputs(request.c_str(), stream);
    std::fflush(stream);
    return code_of(stream, script);
  }

  const std::string name_;
};

PythonHost& host() {
  static const std::unique_ptr<PythonHost> one = []() -> std::unique_ptr<PythonHost> {
    const char* folder = std::getenv("TESSERA_TEST_HOSTS");
    // Ranks have their own number of threads (OMP_NUM_THREADS), so each rank has its own interpreter.
    if (!folder || !*folder || std::getenv("OMP_NUM_THREADS")) return std::make_unique<OwnPythonHost>();
    return std::make_unique<SharedPythonHost>(folder);
  }();
  return *one;
}

}  // namespace

ProcessResult run_python(const std::string& script, const std::vector<std::string>& arguments,
                         const ProcessOptions& options) {
  const std::string path = (source_folder() / script).string();
  if (options.environment.empty()) return host().run(path, arguments, options);
  std::vector<std::string> all = {interpreter(), path};
  all.insert(all.end(), arguments.begin(), arguments.end());
  return run_process(all, options);
}

}  // namespace tessera::testing
