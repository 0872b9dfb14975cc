// What every benchmark shares: rounds that alternate between our code and its peer, and one JSON line per case.
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
// Flags of each benchmark: --json FILE (append the lines there), --rounds N (7), --case PART (only cases whose name
// holds it). The ratio is always how many times better ours is; each figure is the median over rounds. A round in which
// other processes took more than 5 % of a core is done again, for as many rounds as were asked for; what stays
// disturbed is counted. Not thread-safe.
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

// A program that lives as long as this object and answers one JSON line for each JSON line.
class Peer {
 public:
  using Environment = std::vector<std::pair<std::string, std::string>>;
  // Runs words[0], found on PATH, with the rest.
  explicit Peer(std::vector<std::string> words, const Environment& environment = {});
  // A Python script of bench/peers. Runs with the interpreter in TESSERA_PYTHON, or .venv/bin/python of the source
  // tree. Throws when it cannot start.
  Peer(const std::string& script, const std::vector<std::string>& arguments, const Environment& environment = {});
  ~Peer();
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;
  // Throws when the peer ends or answers with something that is no JSON object; {"error": ...} throws its text.
  Json ask(const Json& request);
  pid_t process() const { return process_; }

 private:
  pid_t process_ = -1;
  int to_ = -1, from_ = -1;
  std::string received_;
};

struct Case {
  std::string name;
  std::string unit;
  double at_least = 0;             // the wanted ratio; 0: none
  double at_most = 0;              // the wanted limit of our own figure, in `unit`; 0: none
  bool higher_is_better = true;    // of the values below
  std::function<bool()> verified;  // whether both halves were seen to give the same result; asked after the rounds
  std::function<double()> ours;    // one measurement, in `unit`
  std::function<double()> peer;
  std::function<double()> tuned_peer =
      nullptr;                  // with settings that few users know (allocator, threads); none: no such column
  Json extra = Json::object();  // further fields of the line
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
  // Whether --case asks for it; checks that cost much may be skipped when not.
  bool wants(const std::string& name) const;
  // Measures, prints and appends the line. What this process started is not counted as others.
  void run(const Case& what);
  int threads = 1;  // what the line says
  // 0, or 1 when a case was not verified or missed its ratio.
  int exit_code() const { return failed_ ? 1 : 0; }

 private:
  std::string bench_, json_file_, only_, command_;
  int rounds_ = 7;
  bool failed_ = false;
};

// What `body` returns; after an exception, printed with the bench's name, the exit code that belongs to it.
int bench_main(const char* bench, const std::function<int()>& body);

// Processor model and number of usable cores.
std::string machine();
// Root of the source tree, or a folder in TESSERA_SOURCE.
std::string source_folder();
// Models and texts that './dev assets' fetched: TESSERA_ASSETS, or in the source tree.
std::filesystem::path assets_folder();

}  // namespace tessera::bench
