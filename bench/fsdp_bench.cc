// Compares the host time of FSDP with that of PyTorch's FSDP2: the time per parameter that sharding adds to a forward
// and backward of many small parameters, on one rank and on two. Tensors are tiny, so that arithmetic and communication
// take almost no time. Our ranks and the peer's ranks must compute the same gradient.
//
//   bench_fsdp              the harness; it starts our ranks and the peer's ranks, which answer requests until it ends
//   bench_fsdp --rank       one of our ranks, started by `tessera launch`
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <cmath>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "bench/harness.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/rendezvous/rendezvous.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/nn/module.h"
#include "tessera/parallel/fsdp/fully_shard.h"

namespace tessera::bench {
namespace {

// peers/fsdp.py has the same model.
constexpr int kBlocks = 16, kBlockParameters = 8;
constexpr int64_t kWidth = 4;

struct Block : nn::Callable<Block> {
  std::vector<at::Tensor> weights = std::vector<at::Tensor>(kBlockParameters);
  Block() {
    const auto small =
        at::arange(kWidth * kWidth, at::kFloat).mul(7).remainder(16).sub(8).div(800).view({kWidth, kWidth});
    for (int i = 0; i < kBlockParameters; ++i) {
      register_parameter("weight" + std::to_string(i), weights[static_cast<size_t>(i)], at::eye(kWidth) + small);
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& weight : weights) x = at::linear(x, weight);
    return x;
  }
};

struct Stack : nn::Callable<Stack> {
  std::vector<std::shared_ptr<Block>> blocks;
  Stack() {
    for (int i = 0; i < kBlocks; ++i) {
      blocks.push_back(register_module("blocks." + std::to_string(i), std::make_shared<Block>()));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : blocks) x = (*block)(x);
    return x;
  }
};

void step(Stack& model, const at::Tensor& x) {
  model(x).sum().backward();
  for (const auto& parameter : model.parameters()) parameter.mutable_grad().reset();
}

// Runs one of our ranks. Rank 0 reads requests on its stdin and writes answers to its stdout.
int rank_main() {
  const auto world = comm::World::connect({});
  at::set_num_threads(1);
  const auto mesh = init_device_mesh(world, "cpu", {world->size()});
  Stack sharded, plain;
  for (const auto& block : sharded.blocks) fully_shard(*block, {.mesh = mesh});
  fully_shard(sharded, {.mesh = mesh});
  const auto x = at::ones({2, kWidth}) * (world->rank() + 1);
  while (true) {
    std::string line;
    if (world->rank() == 0 && !std::getline(std::cin, line)) line = "{}";
    const Json request = Json::parse(comm::broadcast_bytes(*world->group(), line));
    if (request.empty()) return 0;
    sharded(x).sum().backward();
    const double check = full_tensor(sharded.parameters().front().grad()).to(at::kDouble).sum().item<double>();
    for (const auto& parameter : sharded.parameters()) parameter.mutable_grad().reset();
    comm::barrier(*world->group());
    std::vector<double> added;  // sharded and plain steps alternate, so that both run under the same load
    for (int i = 0; i < request["steps"].get<int>(); ++i) {
      const double with = seconds_of([&] { step(sharded, x); });
      added.push_back(with - seconds_of([&] { step(plain, x); }));
    }
    const double us = summarize(added).median * 1e6 / (kBlocks * kBlockParameters);
    if (world->rank() == 0) std::cout << Json{{"us", us}, {"check", check}}.dump() << std::endl;
  }
}

void measure(Harness& harness, const std::string& self, int ranks) {
  const auto name = fmt::format("host time per parameter and step, {} rank{}", ranks, ranks == 1 ? "" : "s");
  if (!harness.is_selected(name)) return;
  const char* program = std::getenv("TESSERA_PROGRAM");
  Peer ours({program ? program : source_folder() + "/build/tessera", "launch", "--nproc", std::to_string(ranks), "--",
             self, "--rank"});
  Peer peer("fsdp.py", {std::to_string(ranks)});
  harness.threads = ranks;
  Json our_answer, peer_answer;
  const auto ask = [](Peer& rank_set, int steps, Json& answer) {
    answer = rank_set.ask({{"steps", steps}});
    return answer["us"].get<double>();
  };
  harness.run({.name = name,
               .unit = "us",
               .at_least = 20,
               .higher_is_better = false,
               .verified =
                   [&] {
                     const double a = our_answer["check"], b = peer_answer["check"];
                     return std::abs(a / b - 1) < 1e-5;
                   },
               .ours = [&] { return ask(ours, 200, our_answer); },
               .peer = [&] { return ask(peer, 40, peer_answer); }});
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera::bench;
  return bench_main("fsdp", [&] {
    if (argc == 2 && std::string(argv[1]) == "--rank") return rank_main();
    Harness harness("fsdp", argc, argv);
    for (const int ranks : {1, 2}) measure(harness, argv[0], ranks);
    return harness.exit_code();
  });
}
