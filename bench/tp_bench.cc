// Training steps on 2 local CPU ranks as tensor parallel, with and without sequence parallelism, and as FSDP, beside
// PyTorch's parallelize_module and FSDP2: tokens/s and peak memory a rank. The models are the small Llama and a random
// Llama of SmolLM2's widths with 8 heads and 4 key-value heads. Both halves train on the same tokens with the same
// settings; their losses must agree.
//
//   bench_tp                                       the harness; each half is a long-lived set of ranks
//   bench_tp --rank MODEL ROWS LENGTH dp|tp|sp     one of our ranks, started by `tessera launch`; ROWS are of all ranks
#include <unistd.h>

#include <filesystem>

#include "bench/train_steps.h"
#include "tessera/comm/rendezvous/rendezvous.h"
#include "tessera/models/weights.h"
#include "tessera/parallel/parallelize_model.h"

namespace tessera::bench {
namespace {

int rank_main(const std::string& dir, int64_t rows, int64_t length, const std::string& how) {
  const auto world = comm::World::connect({});
  const bool data = how == "dp";
  const auto mesh = init_device_mesh(world, "cpu", {world->size()}, {data ? "dp_shard" : "tp"});
  const auto model =
      make_parallel_model(ModelConfig::from_folder(dir), at::kFloat, {.mesh = mesh, .sequence_parallel = how == "sp"});
  load_pretrained(*model, dir);
  const StepRows all{.rows = rows, .length = length, .counts = world->rank() == 0};
  const StepRows own{
      .rows = rows / world->size(), .length = length, .data_ranks = world->size(), .data_rank = world->rank()};
  serve_steps(*model, *world, data ? own : all);
  return 0;
}

// A random Llama of SmolLM2-135M's widths, whose heads two ranks can share.
std::string write_wide_llama(const std::filesystem::path& folder) {
  return write_random_model(
      folder / "wide_llama",
      R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
      "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 72,
      "max_position_embeddings": 2048, "rms_norm_eps": 1e-05, "initializer_range": 0.02, "torch_dtype": "float32",
      "tie_word_embeddings": true})");
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera::bench;
  return bench_main("tp", [&] {
    if (argc == 6 && std::string(argv[1]) == "--rank")
      return rank_main(argv[2], std::stoll(argv[3]), std::stoll(argv[4]), argv[5]);
    Harness harness("tp", argc, argv);
    const std::string folder = assets_folder();
    const auto scratch = std::filesystem::temp_directory_path() / ("tessera-bench-tp-" + std::to_string(::getpid()));
    std::filesystem::create_directories(scratch);
    const auto wide = write_wide_llama(scratch);
    for (const std::string how : {"tp", "sp", "dp"}) {
      measure_steps(harness, argv[0],
                    {.name = "small Llama " + how,
                     .peer = "tp_step.py",
                     .words = {folder + "/small_llama", "8", "256", how},
                     .steps = 4,
                     .tokens = 8 * 256});
      measure_steps(harness, argv[0],
                    {.name = "wide Llama " + how,
                     .peer = "tp_step.py",
                     .words = {wide, "4", "256", how},
                     .steps = 1,
                     .tokens = 4 * 256});
    }
    std::filesystem::remove_all(scratch);
    return harness.exit_code();
  });
}
