// Compares training steps on local CPU ranks with PyTorch: tokens/s, peak memory per rank, and the FLOP/s of a step's
// matrix products relative to the peak GEMM rate. FSDP on 2 ranks is compared with FSDP2, in fp32 and bf16. One rank is
// compared with the unsharded model of transformers, also on packed rows and with LoRA. Ours and the peer train on the
// same tokens with the same settings, and their losses must agree.
//
//   bench_train                                   the harness; it starts our ranks and the peer's ranks, which answer
//                                                 requests until it ends
//   bench_train --rank MODEL ROWS LENGTH VARIANT  one of our ranks, started by `tessera launch`; ROWS is per rank.
//                                                 VARIANT: float32, bfloat16, packed, optimizer-in-backward (without
//                                                 gradient clipping), or a folder with a PEFT adapter
//   bench_train --peak DTYPE                      answers each request with the peak GEMM rate
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

constexpr int64_t kDocumentLength = 200;

// Without bf16 instructions, the time would be that of conversions to fp32.
bool has_bf16_instructions() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string word; cpuinfo >> word;) {
    if (word == "avx512_bf16" || word == "amx_bf16") return true;
  }
  fmt::print("train      skipping the bf16 case: this processor has neither avx512_bf16 nor amx_bf16\n");
  return false;
}

int rank_main(const std::string& dir, int64_t rows, int64_t length, const std::string& variant) {
  const auto world = comm::World::connect({});
  const auto mesh = init_device_mesh(world, "cpu", {world->size()}, {"dp"});
  const auto model = make_model(ModelConfig::from_folder(dir), {.device = c10::Device(at::kMeta)});
  const bool has_adapter = std::filesystem::is_directory(variant);
  if (has_adapter) add_adapters(*model, read_adapter_config(variant));
  MixedPrecisionPolicy precision;
  if (variant == "bfloat16") precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  for (const auto& block : model->blocks()) fully_shard(*block, {.mesh = mesh, .mp_policy = precision});
  fully_shard(*model, {.mesh = mesh, .mp_policy = precision});
  to_empty(*model, mesh->device());
  load_pretrained(*model, dir);
  if (has_adapter) load_adapters(*model, variant);
  serve_steps(*model, *world,
              {.rows = rows,
               .length = length,
               .document_length = variant == "packed" ? kDocumentLength : 0,
               .optimizer_in_backward = variant == "optimizer-in-backward",
               .data_ranks = world->size(),
               .data_rank = world->rank()});
  return 0;
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera::bench;
  return bench_main("train", [&] {
    const std::string mode = argc > 1 ? argv[1] : "";
    if (argc == 6 && mode == "--rank") return rank_main(argv[2], std::stoll(argv[3]), std::stoll(argv[4]), argv[5]);
    if (argc == 3 && mode == "--peak") {
      serve_gemm_peak(argv[2]);
      return 0;
    }
    Harness harness("train", argc, argv);
    const std::string small = assets_folder() / "small_llama", smollm2 = assets_folder() / "smollm2";
    const tessera::ScratchFolder scratch("bench_train");
    const auto measure = [&](const StepCase& step_case) { measure_steps(harness, argv[0], step_case); };
    measure({.name = "small Llama, 1 rank",
             .peer = "train_step.py",
             .arguments = {small, "4", "256", "float32"},
             .steps = 8,
             .tokens = 4 * 256,
             .max_memory_ratio = 0.5,
             .ranks = 1,
             .min_speedup = 2.5,
             .min_gemm_share = 0,
             .compare_with_compile = true});
    measure({.name = "small Llama, FSDP on 2 ranks",
             .peer = "train_step.py",
             .arguments = {small, "4", "256", "float32"},
             .steps = 8,
             .tokens = kTrainingRanks * 4 * 256,
             .max_memory_ratio = 0.5,
             .min_speedup = 3.5,
             .min_gemm_share = 0,
             .compare_with_compile = true});
    measure({.name = "SmolLM2-135M, 1 rank",
             .peer = "train_step.py",
             .arguments = {smollm2, "4", "512", "float32"},
             .steps = 1,
             .tokens = 4 * 512,
             .max_memory_ratio = 0.5,
             .ranks = 1,
             .min_gemm_share = 0.85});
    measure({.name = "SmolLM2-135M, FSDP on 2 ranks",
             .peer = "train_step.py",
             .arguments = {smollm2, "2", "512", "float32"},
             .steps = 1,
             .tokens = kTrainingRanks * 2 * 512,
             .max_memory_ratio = 0.5,
             .min_speedup = 4,
             .min_gemm_share = 0.85,
             .compare_with_compile = true});
    if (has_bf16_instructions()) {
      measure({.name = "SmolLM2-135M, FSDP on 2 ranks, bf16",
               .peer = "train_step.py",
               .arguments = {smollm2, "2", "512", "bfloat16"},
               .steps = 1,
               .tokens = kTrainingRanks * 2 * 512,
               .max_memory_ratio = 0.5,
               .min_speedup = 3,
               .min_gemm_share = 0.45,
               .dtype = "bfloat16",
               .loss_tolerance = 1e-2,
               .compare_with_compile = true});
    }
    measure({.name = "small Llama, packed row of 4,096 tokens, documents of 200 tokens",
             .peer = "train_step.py",
             .arguments = {small, "1", "4096", "packed"},
             .steps = 1,
             .tokens = 4096,
             .max_memory_ratio = 0.5,
             .ranks = 1,
             .min_speedup = 5,
             .min_gemm_share = 0,
             .document_length = kDocumentLength});
    measure({.name = "SmolLM2-135M, FSDP on 2 ranks, optimizer in backward",
             .peer = "train_step.py",
             .arguments = {smollm2, "2", "512", "optimizer-in-backward"},
             .peer_arguments = {smollm2, "2", "512", "float32", "0"},
             .steps = 1,
             .tokens = kTrainingRanks * 2 * 512,
             .max_memory_ratio = 0.5});
    if (harness.is_selected("SmolLM2-135M, LoRA")) {
      const auto adapter = (scratch.path() / "adapter").string();
      Peer("lora_adapter.py", {smollm2, adapter}).ask({{"write", true}});
      measure({.name = "SmolLM2-135M, LoRA",
               .peer = "train_step.py",
               .arguments = {smollm2, "4", "512", adapter},
               .steps = 1,
               .tokens = 4 * 512,
               .max_memory_ratio = 0.5,
               .ranks = 1,
               .min_speedup = 3,
               .min_gemm_share = 0,
               .only_adapters = true});
    }
    return harness.exit_code();
  });
}
