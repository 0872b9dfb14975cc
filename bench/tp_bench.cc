// Compares training steps on 2 local CPU ranks with PyTorch's parallelize_module and FSDP2: tokens/s and peak memory
// per rank. The layouts are tensor parallelism, with and without sequence parallelism, and FSDP. The models are the
// small Llama and a random Llama with SmolLM2's widths, 8 heads and 4 key-value heads. Ours and the peer train
// on the same tokens with the same settings, and their losses must agree.
//
//   bench_tp                                    the harness; it starts our ranks and the peer's ranks, which answer
//                                               requests until it ends
//   bench_tp --rank MODEL ROWS LENGTH LAYOUT    one of our ranks, started by `tessera launch`: see LayoutRank
#include <filesystem>

#include "bench/train_steps.h"
#include "tessera/base/files/scratch_folder.h"

namespace tessera::bench {
namespace {

// Writes a random Llama with SmolLM2-135M's widths and an even number of heads, so that two ranks can shard
// them.
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
    if (const auto options = parse_layout_rank(argc, argv)) return serve_layout(*options);
    Harness harness("tp", argc, argv);
    const std::string folder = assets_folder();
    const tessera::ScratchFolder scratch("bench_tp");
    const auto wide = write_wide_llama(scratch.path());
    const std::vector<std::pair<std::string, std::string>> layouts = {{"tp2", "tp"}, {"tp2-sp", "sp"}, {"dp2", "dp"}};
    const auto measure = [&](const std::string& name, const std::string& model, int rows, int steps, double at_least) {
      for (const auto& [layout, peer_layout] : layouts) {
        const auto row_count = std::to_string(rows);
        measure_steps(harness, argv[0],
                      {.name = name + ", " + peer_layout,
                       .peer = "tp_step.py",
                       .arguments = {model, row_count, "256", layout},
                       .peer_arguments = {model, row_count, "256", peer_layout},
                       .steps = steps,
                       .tokens = int64_t{rows} * 256,
                       .max_memory_ratio = 0.5,
                       .min_speedup = at_least});
      }
    };
    measure("small Llama", folder + "/small_llama", 8, 4, 4);
    measure("wide Llama", wide, 4, 1, 1);
    return harness.exit_code();
  });
}
