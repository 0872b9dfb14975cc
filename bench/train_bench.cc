// Compares training steps on local CPU ranks with PyTorch: tokens/s, peak memory per rank, and the rate of a step's
// products relative to their peak rate. FSDP on 2 ranks is compared with FSDP2, in fp32 and bf16. One rank is compared
// with the plain model, also on packed rows and with LoRA. Both train on the same tokens with the same settings, and
// their losses must agree.
//
//   bench_train                                   the harness; each half is a long-lived set of ranks
//   bench_train --rank MODEL ROWS LENGTH HOW      one of our ranks, started by `tessera launch`; ROWS is per rank.
//                                                 HOW: float32, bfloat16, packed, early (updates in backward, no
//                                                 clipping), or a folder with a PEFT adapter
//   bench_train --peak DTYPE                      answers with the highest rate of a product
#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "bench/train_steps.h"
#include "tessera/base/files/scratch_folder.h"
#include "tessera/comm/rendezvous/rendezvous.h"
#include "tessera/models/adapters/adapters.h"
#include "tessera/models/files/weights.h"
#include "tessera/parallel/fsdp/fully_shard.h"

namespace tessera::bench {
namespace {

constexpr int64_t kDocument = 200;

// Without bf16 instructions, ours and the peer would measure a conversion.
bool multiplies_bf16() {
  std::ifstream facts("/proc/cpuinfo");
  for (std::string word; facts >> word;) {
    if (word == "avx512_bf16" || word == "amx_bf16") return true;
  }
  fmt::print("train      bf16 is left out: this processor has neither avx512_bf16 nor amx_bf16\n");
  return false;
}

int rank_main(const std::string& dir, int64_t rows, int64_t length, const std::string& how) {
  const auto world = comm::World::connect({});
  const auto mesh = init_device_mesh(world, "cpu", {world->size()}, {"dp"});
  const auto model = make_model(ModelConfig::from_folder(dir), {.device = c10::Device(at::kMeta)});
  const bool adapted = std::filesystem::is_directory(how);
  if (adapted) add_adapters(*model, read_adapter_config(how));
  MixedPrecisionPolicy precision;
  if (how == "bfloat16") precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  for (const auto& block : model->blocks()) fully_shard(*block, {.mesh = mesh, .mp_policy = precision});
  fully_shard(*model, {.mesh = mesh, .mp_policy = precision});
  to_empty(*model, mesh->device());
  load_pretrained(*model, dir);
  if (adapted) load_adapters(*model, how);
  serve_steps(*model, *world,
              {.rows = rows,
               .length = length,
               .document = how == "packed" ? kDocument : 0,
               .early = how == "early",
               .data_ranks = world->size(),
               .data_rank = world->rank()});
  return 0;
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera::bench;
  return bench_main("train", [&] {
    const std::string asked = argc > 1 ? argv[1] : "";
    if (argc == 6 && asked == "--rank") return rank_main(argv[2], std::stoll(argv[3]), std::stoll(argv[4]), argv[5]);
    if (argc == 3 && asked == "--peak") {
      serve_peak(argv[2]);
      return 0;
    }
    Harness harness("train", argc, argv);
    const std::string small = assets_folder() / "small_llama", smollm2 = assets_folder() / "smollm2";
    const tessera::ScratchFolder scratch("bench_train");
    const auto measure = [&](const StepCase& given) { measure_steps(harness, argv[0], given); };
    measure({.name = "small Llama, 1 rank",
             .peer = "train_step.py",
             .words = {small, "4", "256", "float32"},
             .steps = 8,
             .tokens = 4 * 256,
             .memory_at_most = 0.5,
             .ranks = 1,
             .faster_at_least = 2.5,
             .peak_share = 0,
             .compiled = true});
    measure({.name = "small Llama, FSDP on 2 ranks",
             .peer = "train_step.py",
             .words = {small, "4", "256", "float32"},
             .steps = 8,
             .tokens = kTrainingRanks * 4 * 256,
             .memory_at_most = 0.5,
             .faster_at_least = 3.5,
             .peak_share = 0,
             .compiled = true});
    measure({.name = "SmolLM2-135M, 1 rank",
             .peer = "train_step.py",
             .words = {smollm2, "4", "512", "float32"},
             .steps = 1,
             .tokens = 4 * 512,
             .memory_at_most = 0.5,
             .ranks = 1,
             .peak_share = 0.85});
    measure({.name = "SmolLM2-135M, FSDP on 2 ranks",
             .peer = "train_step.py",
             .words = {smollm2, "2", "512", "float32"},
             .steps = 1,
             .tokens = kTrainingRanks * 2 * 512,
             .memory_at_most = 0.5,
             .faster_at_least = 4,
             .peak_share = 0.85,
             .compiled = true});
    if (multiplies_bf16()) {
      measure({.name = "SmolLM2-135M, FSDP on 2 ranks, bf16",
               .peer = "train_step.py",
               .words = {smollm2, "2", "512", "bfloat16"},
               .steps = 1,
               .tokens = kTrainingRanks * 2 * 512,
               .memory_at_most = 0.5,
               .faster_at_least = 3,
               .peak_share = 0.45,
               .dtype = "bfloat16",
               .loss_within = 1e-2,
               .compiled = true});
    }
    measure({.name = "small Llama, a row of 4,096 tokens, documents of 200",
             .peer = "train_step.py",
             .words = {small, "1", "4096", "packed"},
             .steps = 1,
             .tokens = 4096,
             .memory_at_most = 0.5,
             .ranks = 1,
             .faster_at_least = 5,
             .peak_share = 0,
             .document = kDocument});
    measure({.name = "SmolLM2-135M, FSDP on 2 ranks, updates in backward",
             .peer = "train_step.py",
             .words = {smollm2, "2", "512", "early"},
             .peer_words = {smollm2, "2", "512", "float32", "0"},
             .steps = 1,
             .tokens = kTrainingRanks * 2 * 512,
             .memory_at_most = 0.5});
    if (harness.wants("SmolLM2-135M, LoRA")) {
      const auto adapter = (scratch.path() / "adapter").string();
      Peer("lora_adapter.py", {smollm2, adapter}).ask({{"write", true}});
      measure({.name = "SmolLM2-135M, LoRA",
               .peer = "train_step.py",
               .words = {smollm2, "4", "512", adapter},
               .steps = 1,
               .tokens = 4 * 512,
               .memory_at_most = 0.5,
               .ranks = 1,
               .faster_at_least = 3,
               .peak_share = 0,
               .only_adapters = true});
    }
    return harness.exit_code();
  });
}
