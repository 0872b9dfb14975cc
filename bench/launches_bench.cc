// Compares the number of kernels that one rank launches in a training step with PyTorch, by layout. The tests' fake
// accelerator counts our launches. PyTorch's profiler on the CPU counts the launches of PyTorch's step. The model is
// the small Llama with two layers. Ours and the peer train on the same tokens with the same settings, and their losses
// must agree.
//
//   bench_launches    the harness; it starts our ranks and the peer's ranks, which answer requests until it ends
//   bench_launches --rank MODEL ROWS LENGTH LAYOUT MICRO_BATCHES
//                     one of our ranks, started by `tessera launch`: see LayoutRank
#include <cmath>
#include <cstdlib>
#include <filesystem>

#include "bench/train_steps.h"
#include "tessera/base/files/scratch_folder.h"
#include "tests/support/pretend_device/pretend_device.h"

namespace tessera::bench {
namespace {

std::string write_two_layers(const std::filesystem::path& folder) {
  return write_random_model(
      folder / "two_layers",
      R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8192, "hidden_size": 256,
      "intermediate_size": 704, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
      "max_position_embeddings": 2048, "rms_norm_eps": 1e-06, "initializer_range": 0.02, "torch_dtype": "float32",
      "tie_word_embeddings": false})");
}

int serve_with_launch_counts(LayoutRank options) {
  pretend::install();  // must precede the first backward
  pretend::keep_names(true);
  options.device = "pretend";
  options.kernel_names = [rank = std::stoi(std::getenv("LOCAL_RANK"))] {
    std::vector<std::string> names;
    for (const auto& launch : pretend::take_launches(rank)) names.push_back(launch.name);
    return names;
  };
  return serve_layout(options);
}

void compare(Harness& harness, const std::string& self, const std::string& model, const std::string& layout,
             const std::string& peer_layout, int micro_batches, int ranks = kTrainingRanks) {
  const auto name = layout + ", kernel launches per step";
  if (!harness.is_selected(name)) return;
  const auto batches = std::to_string(micro_batches);
  Peer ours(launch_command(self, ranks, {model, "8", "256", layout, batches}));
  Peer peer("launches.py", {model, std::to_string(ranks), "8", "256", peer_layout, batches});
  const Json request = {{"steps", 4}};
  Json last_ours, last_peer;
  harness.threads = ranks;
  harness.run({.name = name,
               .unit = "launches",
               .at_least = 1 / 0.6,
               .higher_is_better = false,
               .verified =
                   [&] {
                     const double a = last_ours["loss"], b = last_peer["loss"];
                     return std::abs(a / b - 1) < 1e-3;
                   },
               .ours = [&] { return (last_ours = ours.ask(request))["launches"].get<double>(); },
               .peer = [&] { return (last_peer = peer.ask(request))["launches"].get<double>(); }});
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera::bench;
  return bench_main("launches", [&] {
    if (const auto options = parse_layout_rank(argc, argv)) return serve_with_launch_counts(*options);
    Harness harness("launches", argc, argv);
    const tessera::ScratchFolder scratch("bench_launches");
    const auto model = write_two_layers(scratch.path());
    compare(harness, argv[0], model, "dp2", "dp", 1);
    compare(harness, argv[0], model, "dp2-graphs", "dp", 1);
    compare(harness, argv[0], model, "rp2", "dp", 1);  // DDP: its peer is also FSDP2
    compare(harness, argv[0], model, "rp2-dp2", "dp", 1, 4);
    compare(harness, argv[0], model, "cp2", "dp", 1);
    compare(harness, argv[0], model, "tp2", "tp", 1);
    compare(harness, argv[0], model, "tp2-sp", "sp", 1);
    compare(harness, argv[0], model, "1F1B", "1F1B", 4);
    return harness.exit_code();
  });
}
