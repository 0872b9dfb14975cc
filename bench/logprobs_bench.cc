// Computes log-probs of 2 x 1024 tokens over a vocabulary of 151,936 that is sharded over 2 CPU ranks, forward and
// backward. The peer is NeMo RL's unchunked method: a distributed log-softmax of all tokens, gather, and a softmax that
// is saved for backward. Measured are the time, and the peak memory beyond the logits and their gradient. Ours
// and the peer use the same values, and their log-probs and gradients must agree.
//
//   bench_logprobs                    the harness; it starts our ranks and the peer's ranks, which answer requests
//   bench_logprobs --rank DTYPE       one of our ranks, started by `tessera launch`
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <memory>

#include "bench/harness.h"
#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/rendezvous/rendezvous.h"
#include "tessera/comm/rendezvous/world.h"
#include "tessera/kernels/logprobs/logprobs.h"

namespace tessera::bench {
namespace {

constexpr int kRanks = 2;
constexpr int64_t kRows = 2, kLength = 1024, kVocabulary = 151'936;

// Returns this rank's columns of the logits. Element (t, v) of the logits is ((t V + v) 7919 mod 10007) / 1000 - 5, as
// in the peer.
at::Tensor make_logits(const kernels::VocabShard& shard, c10::ScalarType dtype) {
  const auto logits = at::empty({kRows * kLength, shard.end - shard.start}, dtype);
  for (int64_t t = 0; t < kRows * kLength; ++t) {
    const int64_t first = t * kVocabulary;
    const auto index = at::arange(first + shard.start, first + shard.end, at::kLong);
    logits[t].copy_(index.mul_(7919).remainder_(10007).to(at::kFloat).div_(1000).sub_(5));
  }
  return logits.view({kRows, kLength, shard.end - shard.start}).set_requires_grad(true);
}

// Returns "VmRSS" or "VmHWM" of this process in bytes.
int64_t memory_of(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(name + ":")) return std::stoll(line.substr(name.size() + 1)) * 1024;
  }
  return 0;
}

int rank_main(const std::string& dtype) {
  const auto world = comm::World::connect({});
  const int64_t columns = kVocabulary / world->size();
  const kernels::VocabShard shard{world->rank() * columns, (world->rank() + 1) * columns, world->group()};
  const auto logits = make_logits(shard, dtype == "bfloat16" ? at::kBFloat16 : at::kFloat);
  const auto target =
      at::arange(kRows * kLength, at::kLong).mul_(104'729).remainder_(kVocabulary).view({kRows, kLength});
  while (true) {
    std::string line;
    if (world->rank() == 0 && !std::getline(std::cin, line)) line = "{\"steps\": 0}";
    if (Json::parse(comm::broadcast_bytes(*world->group(), line)).at("steps").get<int64_t>() == 0) return 0;
    logits.mutable_grad().reset();
    std::ofstream("/proc/self/clear_refs") << "5";  // resets the peak
    const int64_t before = memory_of("VmRSS");
    comm::barrier(*world->group());
    double sum = 0;
    const double seconds = seconds_of([&] {
      const auto logprobs = kernels::distributed_logprob(logits, target, shard);
      logprobs.sum().backward();
      sum = logprobs.sum(at::kDouble).item<double>();
    });
    const int64_t extra_memory = memory_of("VmHWM") - before - logits.numel() * static_cast<int64_t>(logits.itemsize());
    double square = 0;
    for (const auto& row : logits.grad().flatten(0, 1).unbind(0)) {
      square += row.to(at::kFloat).square().sum().item<double>();
    }
    const auto answers = comm::all_gather_bytes(*world->group(), Json{seconds, extra_memory, square}.dump());
    if (world->rank() > 0) continue;
    Json answer = {{"seconds", 0.0}, {"extra_bytes", 0.0}, {"square", 0.0}, {"sum", sum}};
    for (const auto& text : answers) {
      const auto found = Json::parse(text);
      answer["seconds"] = std::max(answer["seconds"].get<double>(), found[0].get<double>());
      answer["extra_bytes"] = std::max(answer["extra_bytes"].get<double>(), found[1].get<double>());
      answer["square"] = answer["square"].get<double>() + found[2].get<double>();
    }
    std::cout << answer.dump() << std::endl;
  }
}

void measure(Harness& harness, const std::string& self, const std::string& dtype, double tolerance) {
  const std::string name = "2 x 1024 x 151,936, " + dtype;
  const std::string time = name + ", time", memory = name + ", peak memory beyond logits and gradient";
  if (!harness.is_selected(time) && !harness.is_selected(memory)) return;
  const char* program = std::getenv("TESSERA_PROGRAM");
  // A process does not return all freed memory to the system, so memory is measured in the first pass of a new process.
  const auto start_ours = [&] {
    return std::make_unique<Peer>(std::vector<std::string>{program ? program : source_folder() + "/build/tessera",
                                                           "launch", "--nproc", std::to_string(kRanks), "--", self,
                                                           "--rank", dtype});
  };
  const auto start_peer = [&](const Peer::Environment& environment) {
    return std::make_unique<Peer>("logprobs.py", std::vector<std::string>{std::to_string(kRanks), dtype}, environment);
  };
  const Peer::Environment allocator = {{"LD_PRELOAD", "libtcmalloc_minimal.so.4"}};
  auto ours = start_ours(), peer = start_peer({}), tuned = start_peer(allocator);
  const Json request = {{"steps", 1}};
  Json last_ours = ours->ask(request), last_peer = peer->ask(request), last_tuned = tuned->ask(request);
  const auto agree = [&] {
    const auto close = [&](const char* key) {
      return std::abs(last_ours[key].get<double>() / last_peer[key].get<double>() - 1) < tolerance;
    };
    return close("sum") && close("square");
  };
  harness.threads = kRanks;
  harness.run({.name = time,
               .unit = "ms",
               .at_least = 2,
               .higher_is_better = false,
               .verified = agree,
               .ours = [&] { return (last_ours = ours->ask(request))["seconds"].get<double>() * 1e3; },
               .peer = [&] { return (last_peer = peer->ask(request))["seconds"].get<double>() * 1e3; },
               .tuned_peer = [&] { return (last_tuned = tuned->ask(request))["seconds"].get<double>() * 1e3; }});
  ours.reset();
  peer.reset();
  tuned.reset();
  const auto extra_memory = [&](const Json& answer) {
    return std::max(answer["extra_bytes"].get<double>() / (1 << 20),
                    0.1);  // smaller values are noise: Linux updates VmRSS in batches of pages
  };
  harness.run({.name = memory,
               .unit = "MiB",
               .at_least = 4,
               .higher_is_better = false,
               .verified = agree,
               .ours = [&] { return extra_memory(last_ours = start_ours()->ask(request)); },
               .peer = [&] { return extra_memory(last_peer = start_peer({})->ask(request)); },
               .tuned_peer = [&] { return extra_memory(last_tuned = start_peer(allocator)->ask(request)); }});
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera::bench;
  return bench_main("logprobs", [&] {
    if (argc == 3 && std::string(argv[1]) == "--rank") return rank_main(argv[2]);
    Harness harness("logprobs", argc, argv);
    measure(harness, argv[0], "float32", 1e-4);
    measure(harness, argv[0], "bfloat16", 2e-3);
    return harness.exit_code();
  });
}
