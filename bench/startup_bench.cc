// Measures the time from the start of a process to its first result. `tessera doctor` is compared with `import torch`
// in Python. The first training step of 2 ranks, which load a model and shard it with FSDP (bench_train --rank), is
// compared with the same work in PyTorch.
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <optional>

#include "bench/harness.h"

namespace tessera::bench {
namespace {

// Starts ranks and returns the seconds until their first answer. Their shutdown is not measured.
template <class Start>
double first_answer(Start&& start, Json& answer) {
  std::optional<Peer> ranks;
  return seconds_of([&] {
    start(ranks);
    answer = ranks->ask({{"steps", 1}});
  });
}

double run_to_end(const std::string& command, bool& succeeded) {
  return seconds_of([&] { succeeded = std::system((command + " >/dev/null").c_str()) == 0; });
}

void measure_doctor(Harness& harness, const std::string& program) {
  const char* python = std::getenv("TESSERA_PYTHON");
  const std::string interpreter = python ? python : source_folder() + "/.venv/bin/python";
  bool ours_succeeded = false, peer_succeeded = false;
  harness.run(
      {.name = "tessera doctor (loads libtorch) vs. import torch",
       .unit = "s",
       .at_most = 0.6,
       .higher_is_better = false,
       .verified = [&] { return ours_succeeded && peer_succeeded; },
       .ours = [&] { return run_to_end(program + " doctor", ours_succeeded); },
       .peer =
           [&] { return run_to_end(interpreter + " -c 'import torch; torch.__config__.show()'", peer_succeeded); }});
}

void measure_first_step(Harness& harness, const std::string& program, const std::string& self, const std::string& name,
                        const std::string& model, const std::string& rows, double at_least) {
  constexpr const char* kRanks = "2";
  constexpr const char* kLength = "256";
  const std::string bench_train = std::filesystem::path(self).parent_path() / "bench_train";
  Json ours, peer;
  harness.threads = 2;
  harness.run({.name = "first step of " + name,
               .unit = "s",
               .at_least = at_least,
               .higher_is_better = false,
               .verified = [&] { return std::abs(ours["loss"].get<double>() / peer["loss"].get<double>() - 1) < 1e-3; },
               .ours =
                   [&] {
                     return first_answer(
                         [&](auto& ranks) {
                           ranks.emplace(std::vector<std::string>{program, "launch", "--nproc", kRanks, "--",
                                                                  bench_train, "--rank", model, rows, kLength,
                                                                  "float32"});
                         },
                         ours);
                   },
               .peer =
                   [&] {
                     return first_answer(
                         [&](auto& ranks) {
                           ranks.emplace("train_step.py", std::vector<std::string>{model, kRanks, rows, kLength});
                         },
                         peer);
                   }});
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera::bench;
  return bench_main("startup", [&] {
    Harness harness("startup", argc, argv);
    const char* variable = std::getenv("TESSERA_PROGRAM");
    const std::string program = variable ? variable : source_folder() + "/build/tessera";
    const std::string assets = assets_folder();
    measure_doctor(harness, program);
    measure_first_step(harness, program, argv[0], "the small Llama", assets + "/small_llama", "4", 6);
    measure_first_step(harness, program, argv[0], "SmolLM2-135M", assets + "/smollm2", "2", 1);
    return harness.exit_code();
  });
}
