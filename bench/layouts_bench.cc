// Training steps of one model over 2 and 4 local CPU ranks, by layout: tokens/s and peak memory a rank. Pipelines stand
// beside torch.distributed.pipelining with the same schedule, micro-batches and layers a stage; experts beside a plain
// transformers Qwen3-MoE under FSDP2; the other layouts beside transformers under FSDP2 over as many ranks. All halves
// train on the same tokens with the same settings; their losses must agree.
//
//   bench_layouts                                             the harness; each half is a long-lived set of ranks
//   bench_layouts --rank MODEL ROWS LENGTH HOW MICRO_BATCHES  one of our ranks, started by `tessera launch`; ROWS of
//                                                             all ranks; HOW: a layout as "tp2-pp2", or a schedule
#include <unistd.h>

#include <filesystem>
#include <sstream>

#include "bench/train_steps.h"
#include "tessera/base/error.h"
#include "tessera/comm/rendezvous/rendezvous.h"
#include "tessera/models/weights.h"
#include "tessera/parallel/parallelize_model.h"
#include "tessera/train/run_layout.h"
#include "tessera/train/run_mesh.h"

namespace tessera::bench {
namespace {

bool is_schedule(const std::string& how) { return how.find_first_of("0123456789") == 0 || std::isupper(how[0]) != 0; }

// "ep2" or "tp2-cp2"; what is left of the ranks shards data.
train::Recipe recipe_of(const std::string& how, int64_t ranks) {
  train::Recipe recipe;
  auto& parallel = recipe.parallel;
  if (is_schedule(how)) {
    parallel.pp = ranks;
    parallel.schedule = how;
  } else {
    std::istringstream words(how);
    for (std::string word; std::getline(words, word, '-');) {
      const int64_t size = std::stoll(word.substr(2));
      const auto name = word.substr(0, 2);
      (name == "tp"   ? parallel.tp
       : name == "cp" ? parallel.cp
       : name == "pp" ? parallel.pp
       : name == "ep" ? parallel.ep
                      : parallel.dp_shard) = size;
    }
  }
  parallel.dp_shard = ranks / (parallel.tp * parallel.cp * parallel.pp);
  return recipe;
}

int rank_main(const std::string& dir, int64_t rows, int64_t length, const std::string& how, int64_t micro_batches) {
  const auto world = comm::World::connect({});
  const auto recipe = recipe_of(how, world->size());
  const auto& parallel = recipe.parallel;
  const train::RunLayout layout{
      .dp_shard = parallel.dp_shard, .tp = parallel.tp, .cp = parallel.cp, .pp = parallel.pp, .ep = parallel.ep};
  const train::RunMesh place(layout, "cpu", world);
  const auto config = ModelConfig::from_folder(dir);
  const auto stages = train::pipeline_options(recipe, config, place.mesh());
  const auto model = make_parallel_model(
      config, at::kFloat, {.mesh = place.mesh(), .ep = parallel.ep, .cp_rotate_method = "alltoall"}, stages);
  load_pretrained(*model, dir);
  serve_steps(*model, *world,
              {.rows = rows / place.data_size(),
               .length = length,
               .data_ranks = place.data_size(),
               .data_rank = place.data_rank(),
               .counts = place.counts(),
               .micro_batches = std::max<int64_t>(micro_batches / place.data_size(), 1),
               .own = [&](const data::Batch& batch) { return place.own_tokens(batch); },
               .pipeline = stages});
  return 0;
}

// 8 experts, of which a token takes 2, in the widths of the small Llama.
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
    if (argc == 7 && std::string(argv[1]) == "--rank")
      return rank_main(argv[2], std::stoll(argv[3]), std::stoll(argv[4]), argv[5], std::stoll(argv[6]));
    Harness harness("layouts", argc, argv);
    const std::string llama = assets_folder() / "small_llama";
    const auto scratch =
        std::filesystem::temp_directory_path() / ("tessera-bench-layouts-" + std::to_string(::getpid()));
    std::filesystem::create_directories(scratch);
    const auto moe = write_small_moe(scratch);
    const auto measure = [&](const std::string& name, const std::string& model, const std::string& how,
                             const std::string& peer, int ranks, int micro_batches) {
      measure_steps(harness, argv[0],
                    {.name = name,
                     .peer = "layout_step.py",
                     .words = {model, "8", "256", how, std::to_string(micro_batches)},
                     .peer_words = {model, "8", "256", peer, std::to_string(micro_batches)},
                     .steps = 2,
                     .tokens = 8 * 256,
                     .ranks = ranks});
    };
    for (const std::string schedule : {"1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble"}) {
      measure("small Llama, pipeline of 2, " + schedule, llama, schedule, schedule, 2, 4);
    }
    measure("small Llama, pipeline of 4, 1F1B", llama, "1F1B", "1F1B", 4, 8);
    for (const std::string how : {"tp2", "cp2", "dp2"}) {
      measure("small Llama, " + how + ", beside FSDP2", llama, how, "dp", 2, 1);
    }
    for (const std::string how : {"tp2-pp2", "cp2-tp2", "dp2-pp2"}) {
      measure("small Llama, " + how + ", beside FSDP2", llama, how, "dp", 4, 4);
    }
    measure("small Qwen3-MoE, 2 ranks, ep2", moe, "ep2", "dp", 2, 1);
    measure("small Qwen3-MoE, 2 ranks, dp2", moe, "dp2", "dp", 2, 1);
    std::filesystem::remove_all(scratch);
    return harness.exit_code();
  });
}
