// Measures training steps of one model over 2 and 4 local CPU ranks, by layout: tokens/s and peak memory per rank. The
// peer of pipelines is torch.distributed.pipelining with the same schedule, micro-batches and layers per stage. The
// peer of expert parallelism is transformers' Qwen3-MoE under FSDP2. The peer of the other layouts is transformers
// under FSDP2 over the same number of ranks. Ours and the peer train on the same tokens with the same settings, and
// their losses must agree.
//
//   bench_layouts     the harness; it starts our ranks and the peer's ranks, which answer requests until it ends
//   bench_layouts --rank MODEL ROWS LENGTH LAYOUT MICRO_BATCHES
//                     one of our ranks, started by `tessera launch`: see LayoutRank
#include <filesystem>

#include "bench/train_steps.h"
#include "tessera/base/files/scratch_folder.h"

namespace tessera::bench {
namespace {

// Writes a model with the widths of the small Llama and 8 experts, of which each token uses 2.
std::string write_small_moe(const std::filesystem::path& folder) {
  return write_random_model(
      folder / "small_moe",
      R"({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 8192, "hidden_size": 256,
      "intermediate_size": 704, "moe_intermediate_size": 352, "num_experts": 8, "num_experts_per_tok": 2,
      "norm_topk_prob": true, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
      "max_position_embeddings": 2048, "rms_norm_eps": 1e-06, "initializer_range": 0.02, "torch_dtype": "float32",
      "tie_word_embeddings": false})");
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera::bench;
  return bench_main("layouts", [&] {
    if (const auto options = parse_layout_rank(argc, argv)) return serve_layout(*options);
    Harness harness("layouts", argc, argv);
    const std::string llama = assets_folder() / "small_llama";
    const tessera::ScratchFolder scratch("bench_layouts");
    const auto moe = write_small_moe(scratch.path());
    const auto measure = [&](const std::string& name, const std::string& model, const std::string& layout,
                             const std::string& peer_layout, int ranks, int micro_batches, double at_least = 1) {
      measure_steps(harness, argv[0],
                    {.name = name,
                     .peer = "layout_step.py",
                     .arguments = {model, "8", "256", layout, std::to_string(micro_batches)},
                     .peer_arguments = {model, "8", "256", peer_layout, std::to_string(micro_batches)},
                     .steps = 2,
                     .tokens = 8 * 256,
                     .max_memory_ratio = 0.5,
                     .ranks = ranks,
                     .min_speedup = at_least});
    };
    for (const std::string schedule : {"1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble"}) {
      measure("small Llama, pipeline of 2, " + schedule, llama, schedule, schedule, 2, 4);
    }
    measure("small Llama, pipeline of 4, 1F1B", llama, "1F1B", "1F1B", 4, 8);
    for (const std::string layout : {"tp2", "cp2", "dp2"}) {
      measure("small Llama, " + layout + " vs. FSDP2", llama, layout, "dp", 2, 1);
    }
    for (const std::string layout : {"tp2-pp2", "cp2-tp2", "dp2-pp2"}) {
      measure("small Llama, " + layout + " vs. FSDP2", llama, layout, "dp", 4, 4);
    }
    measure("small Qwen3-MoE, 2 ranks, ep2", moe, "ep2", "dp", 2, 1, 3);
    measure("small Qwen3-MoE, 2 ranks, dp2", moe, "dp2", "dp", 2, 1, 3);
    return harness.exit_code();
  });
}
