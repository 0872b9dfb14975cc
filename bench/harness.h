// The harness of all benchmarks. A benchmark measures cases in rounds. Each round runs our code and its peer, which is
// the program that it is compared with. The result of a case is one JSON line.
//
//   int main(int argc, char** argv) {
//     return bench_main("tokenizer", [&] {
//       Harness harness("tokenizer", argc, argv);
//       Peer peer("tokenizer.py", {"tokenizer.json"});
//       harness.run({.name = "lines", .unit = "MB/s", .at_least = 3, .verified = [&] { return same_ids; },
//                    .ours = [&] { return megabytes / seconds_of([&] { encode(); }); },
//                    .peer = [&] { return megabytes / peer.ask({{"lines", true}})["seconds"].get<double>(); }});
//       return harness.exit_code();
//     });
//   }
//
// Flags of each benchmark: --json FILE (append the lines to FILE), --rounds N (7), --case PART (only cases whose name
// contains PART). A ratio above 1 means that our code is better. Each figure is the median over the rounds. A round is
// disturbed if other processes used more than 5 % of a core during it. Disturbed rounds are repeated, at most N times
// per case. The JSON line counts the rounds that are still disturbed. Not thread-safe.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace tessera::bench {

using Json = nlohmann::json;

// A child process that answers each JSON line on its stdin with one JSON line on its stdout. It runs as long as this
// object exists.
class Peer {
 public:
  using Environment = std::vector<std::pair<std::string, std::string>>;
  // Runs the program command[0], which is searched in PATH, with the other elements as arguments.
  explicit Peer(std::vector<std::string> command, const Environment& environment = {});
  // Runs a Python script of bench/peers with the interpreter in TESSERA_PYTHON, or .venv/bin/python of the source tree.
  // Throws when the script cannot start.
  Peer(const std::string& script, const std::vector<std::string>& arguments, const Environment& environment = {});
  ~Peer();
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;
  // Throws when the peer ends, or when its answer is not a JSON object. An answer {"error": ...} throws its text.
  Json ask(const Json& request);
  pid_t process() const { return process_; }

 private:
  pid_t process_ = -1;
  int request_pipe_ = -1, answer_pipe_ = -1;
  std::string received_;
};

struct Case {
  std::string name;
  std::string unit;
  double at_least = 0;             // smallest accepted ratio; 0: no limit
  double at_most = 0;              // largest accepted value of our figure, in `unit`; 0: no limit
  bool higher_is_better = true;    // for the values of `ours` and `peer`
  std::function<bool()> verified;  // whether ours and the peer gave the same result; called after the rounds
  std::function<double()> ours;    // one measurement, in `unit`
  std::function<double()> peer;
  std::function<double()> tuned_peer =
      nullptr;                  // the peer with tuned settings (allocator, threads); null: not measured
  Json extra = Json::object();  // further fields of the JSON line
};

struct Summary {
  double median, low, high;  // low and high: the 10 % and 90 % quantiles
};
Summary summarize(std::vector<double> values);

template <class Work>
double seconds_of(Work&& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

class Harness {
 public:
  Harness(std::string bench, int argc, char** argv);
  // Whether --case selects the case. Callers use it to skip the expensive set-up of other cases.
  bool is_selected(const std::string& name) const;
  // Measures the case, prints the result and appends it to the file. Descendants of this process do not count as other
  // processes.
  void run(const Case& bench_case);
  int threads = 1;  // number of threads, for the JSON line
  // 0, or 1 when a case was not verified, or missed at_least or at_most.
  int exit_code() const { return failed_ ? 1 : 0; }

 private:
  std::string bench_, json_file_, case_filter_, command_;
  int rounds_ = 7;
  bool failed_ = false;
};

// Returns the result of `body`. An exception is printed with the benchmark's name and gives its exit code.
int bench_main(const char* bench, const std::function<int()>& body);

// Returns the processor model and the number of usable cores.
std::string machine();
// Returns TESSERA_SOURCE, or the root of the source tree.
std::string source_folder();
// Returns the folder of the models and texts that './dev assets' fetches: TESSERA_ASSETS, or build/assets.
std::filesystem::path assets_folder();

}  // namespace tessera::bench
