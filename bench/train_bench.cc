// FSDP training steps on 2 local CPU ranks beside PyTorch FSDP2: tokens/s and peak memory a rank, for the small Llama
// and for SmolLM2-135M. Both halves train on the same tokens with the same settings; their losses must agree.
//
//   bench_train                               the harness; each half is a long-lived set of ranks
//   bench_train --rank MODEL ROWS LENGTH      one of our ranks, started by `tessera launch`
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <iostream>

#include "bench/harness.h"
#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/rendezvous/rendezvous.h"
#include "tessera/data/batch.h"
#include "tessera/kernels/linear_cross_entropy.h"
#include "tessera/models/weights.h"
#include "tessera/optim/optimizer.h"
#include "tessera/parallel/fully_shard.h"
#include "tessera/train/step.h"

namespace tessera::bench {
namespace {

constexpr int kRanks = 2;

// Row of consecutive values of (7919 * index) modulo the vocabulary, as in the peer.
data::Batch make_rows(int64_t first, int64_t rows, int64_t length, int64_t vocabulary) {
  const auto tokens =
      at::arange(first, first + rows * length, at::kLong).mul_(7919).remainder_(vocabulary).view({rows, length});
  const auto labels = at::full_like(tokens, kIgnoredLabel);
  labels.narrow(1, 0, length - 1).copy_(tokens.narrow(1, 1, length - 1));
  const auto positions = at::arange(length, at::kLong).expand({rows, length}).contiguous();
  return data::make_batch(tokens, labels, positions, at::zeros_like(tokens));
}

// One of our ranks: reads requests on rank 0's stdin, answers there.
int rank_main(const std::string& dir, int64_t rows, int64_t length) {
  const auto world = comm::World::connect({});
  const auto mesh = init_device_mesh(world, "cpu", {world->size()}, {"dp"});
  const auto config = ModelConfig::from_folder(dir);
  const auto model = make_model(config, {.device = c10::Device(at::kMeta)});
  for (const auto& block : model->blocks()) fully_shard(*block, {.mesh = mesh});
  fully_shard(*model, {.mesh = mesh});
  to_empty(*model, mesh->device());
  load_pretrained(*model, dir);
  const auto optimizer = optim::make_adamw(*model, {.lr = 1e-4, .beta1 = 0.9, .beta2 = 0.95, .weight_decay = 0.1});
  train::TrainStep step(*model, *optimizer, world->group(), {.max_grad_norm = 1.0});
  int64_t done = 0;
  while (true) {
    std::string line;
    if (world->rank() == 0 && !std::getline(std::cin, line)) line = "{\"steps\": 0}";
    const auto steps = Json::parse(comm::broadcast_bytes(*world->group(), line)).at("steps").get<int64_t>();
    if (steps == 0) return 0;
    comm::barrier(*world->group());
    double loss = 0;
    const double seconds = seconds_of([&] {
      for (int64_t i = 0; i < steps; ++i, ++done) {
        const int64_t first = (done * world->size() + world->rank()) * rows * length;
        loss = step.run({make_rows(first, rows, length, config.vocab_size)}, 1e-4).loss;
      }
    });
    std::vector<int64_t> peaks;
    for (const auto& each : comm::all_gather_bytes(*world->group(), std::to_string(train::peak_resident_bytes()))) {
      peaks.push_back(std::stoll(each));
    }
    if (world->rank() == 0)
      std::cout << Json{{"seconds", seconds}, {"loss", loss}, {"peak_bytes", peaks}}.dump() << std::endl;
  }
}

double largest(const Json& peaks) {
  double most = 0;
  for (const auto& each : peaks) most = std::max(most, each.get<double>());
  return most;
}

struct Setting {
  std::string name, model;
  int64_t rows, length, steps;
  double memory_at_least;
};

void measure(Harness& harness, const std::string& self, const Setting& setting) {
  if (!harness.wants(setting.name)) return;
  const std::vector<std::string> sizes = {std::to_string(setting.rows), std::to_string(setting.length)};
  const char* program = std::getenv("TESSERA_PROGRAM");
  Peer ours({program ? program : source_folder() + "/build/tessera", "launch", "--nproc", std::to_string(kRanks), "--",
             self, "--rank", setting.model, sizes[0], sizes[1]});
  const std::vector<std::string> peer_arguments = {setting.model, std::to_string(kRanks), sizes[0], sizes[1]};
  Peer peer("train_step.py", peer_arguments);
  Peer tuned("train_step.py", peer_arguments,
             {{"LD_PRELOAD", "libtcmalloc_minimal.so.4"}});  // the allocator that ours links
  const Json request = {{"steps", setting.steps}};
  Json last_ours = ours.ask(request), last_peer = peer.ask(request),
       last_tuned = tuned.ask(request);  // warm-up; the same steps on both sides from here on
  const auto agree = [&] {
    return std::abs(last_ours["loss"].get<double>() / last_peer["loss"].get<double>() - 1) < 1e-3;
  };
  const double tokens = static_cast<double>(setting.steps * setting.rows * setting.length * kRanks);
  harness.threads = kRanks;
  harness.run({.name = setting.name + " tokens/s",
               .unit = "tokens/s",
               .at_least = 1,
               .verified = agree,
               .ours = [&] { return tokens / (last_ours = ours.ask(request))["seconds"].get<double>(); },
               .peer = [&] { return tokens / (last_peer = peer.ask(request))["seconds"].get<double>(); },
               .tuned_peer = [&] { return tokens / (last_tuned = tuned.ask(request))["seconds"].get<double>(); }});
  harness.run({.name = setting.name + " peak memory a rank",
               .unit = "MiB",
               .at_least = 1 / setting.memory_at_least,
               .higher_is_better = false,
               .verified = agree,
               .ours = [&] { return largest(last_ours["peak_bytes"]) / (1 << 20); },
               .peer = [&] { return largest(last_peer["peak_bytes"]) / (1 << 20); },
               .tuned_peer = [&] { return largest(last_tuned["peak_bytes"]) / (1 << 20); }});
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera::bench;
  return bench_main("train", [&] {
    if (argc == 5 && std::string(argv[1]) == "--rank")
      return rank_main(argv[2], std::stoll(argv[3]), std::stoll(argv[4]));
    Harness harness("train", argc, argv);
    const char* assets = std::getenv("TESSERA_ASSETS");
    const std::string folder = assets ? assets : source_folder() + "/build/assets";
    measure(harness, argv[0], {"small Llama", folder + "/small_llama", 4, 256, 8, 0.5});
    measure(harness, argv[0], {"SmolLM2-135M", folder + "/smollm2", 2, 256, 1, 0.75});
    return harness.exit_code();
  });
}
