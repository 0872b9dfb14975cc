// FSDP training steps on 2 local CPU ranks beside PyTorch FSDP2: tokens/s and peak memory a rank, for the small Llama
// and for SmolLM2-135M. Both halves train on the same tokens with the same settings; their losses must agree.
//
//   bench_train                               the harness; each half is a long-lived set of ranks
//   bench_train --rank MODEL ROWS LENGTH      one of our ranks, started by `tessera launch`; ROWS are a rank's
#include <cstdlib>

#include "bench/train_steps.h"
#include "tessera/comm/rendezvous/rendezvous.h"
#include "tessera/models/weights.h"
#include "tessera/parallel/fully_shard.h"

namespace tessera::bench {
namespace {

int rank_main(const std::string& dir, int64_t rows, int64_t length) {
  const auto world = comm::World::connect({});
  const auto mesh = init_device_mesh(world, "cpu", {world->size()}, {"dp"});
  const auto model = make_model(ModelConfig::from_folder(dir), {.device = c10::Device(at::kMeta)});
  for (const auto& block : model->blocks()) fully_shard(*block, {.mesh = mesh});
  fully_shard(*model, {.mesh = mesh});
  to_empty(*model, mesh->device());
  load_pretrained(*model, dir);
  serve_steps(*model, *world,
              {.rows = rows, .length = length, .data_ranks = world->size(), .data_rank = world->rank()});
  return 0;
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera::bench;
  return bench_main("train", [&] {
    if (argc == 5 && std::string(argv[1]) == "--rank")
      return rank_main(argv[2], std::stoll(argv[3]), std::stoll(argv[4]));
    Harness harness("train", argc, argv);
    const std::string folder = assets_folder();
    measure_steps(harness, argv[0],
                  {.name = "small Llama",
                   .peer = "train_step.py",
                   .words = {folder + "/small_llama", "4", "256"},
                   .steps = 8,
                   .tokens = kTrainingRanks * 4 * 256,
                   .memory_at_most = 0.5});
    measure_steps(harness, argv[0],
                  {.name = "SmolLM2-135M",
                   .peer = "train_step.py",
                   .words = {folder + "/smollm2", "2", "256"},
                   .steps = 1,
                   .tokens = kTrainingRanks * 2 * 256,
                   .memory_at_most = 0.75});
    return harness.exit_code();
  });
}
