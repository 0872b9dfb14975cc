// Training steps on 2 local CPU ranks as tensor parallel, with and without sequence parallelism, and as FSDP, beside
// PyTorch's parallelize_module and FSDP2: tokens/s and peak memory a rank. The models are the small Llama and a random Llama of
// SmolLM2's widths with 8 heads and 4 key-value heads. Both halves train on the same tokens with the same settings; their
// losses must agree.
//
//   bench_tp                                       the harness; each half is a long-lived set of ranks
//   bench_tp --rank MODEL ROWS LENGTH dp|tp|sp     one of our ranks, started by `tessera launch`
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <iostream>

#include "bench/harness.h"
#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/rendezvous/rendezvous.h"
#include "tessera/data/batch.h"
#include "tessera/kernels/ignored_label.h"
#include "tessera/models/weights.h"
#include "tessera/optim/optimizer.h"
#include "tessera/parallel/parallelize_model.h"
#include "tessera/train/step.h"

namespace tessera::bench {
namespace {

constexpr int kRanks = 2;

// Rows of consecutive values of (7919 * index) modulo the vocabulary, as in the peer.
data::Batch rows_from(int64_t first, int64_t rows, int64_t length, int64_t vocabulary) {
  const auto tokens =
      at::arange(first, first + rows * length, at::kLong).mul_(7919).remainder_(vocabulary).view({rows, length});
  const auto labels = at::full_like(tokens, kIgnoredLabel);
  labels.narrow(1, 0, length - 1).copy_(tokens.narrow(1, 1, length - 1));
  const auto positions = at::arange(length, at::kLong).expand({rows, length}).contiguous();
  return data::make_batch(tokens, labels, positions, at::zeros_like(tokens));
}

// One of our ranks: reads requests on rank 0's stdin, answers there.
int rank_main(const std::string& dir, int64_t rows, int64_t length, const std::string& how) {
  const auto world = comm::World::connect({});
  const bool data = how == "dp";
  const auto mesh = init_device_mesh(world, "cpu", {world->size()}, {data ? "dp_shard" : "tp"});
  const auto config = ModelConfig::from_folder(dir);
  const auto model = make_model(config, {.device = c10::Device(at::kMeta)});
  parallelize_model(*model, {.mesh = mesh, .sequence_parallel = how == "sp"});
  to_empty(*model, mesh->device());
  load_pretrained(*model, dir);
  const auto optimizer = optim::make_adamw(*model, {.lr = 1e-4, .beta1 = 0.9, .beta2 = 0.95, .weight_decay = 0.1});
  train::TrainStep step(*model, *optimizer, world->group(),
                        {.max_grad_norm = 1.0, .counts = data || world->rank() == 0});
  const int64_t data_ranks = data ? world->size() : 1, data_rank = data ? world->rank() : 0, own = rows / data_ranks;
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
        const int64_t first = (done * data_ranks + data_rank) * own * length;
        loss = step.run({rows_from(first, own, length, config.vocab_size)}, 1e-4).loss;
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

double largest_of(const Json& peaks) {
  double most = 0;
  for (const auto& each : peaks) most = std::max(most, each.get<double>());
  return most;
}

struct Setting {
  std::string name, model, how;
  int64_t rows, length, steps;
};

void measure(Harness& harness, const std::string& self, const Setting& setting) {
  const auto name = setting.name + " " + setting.how;
  if (!harness.wants(name)) return;
  const std::vector<std::string> sizes = {std::to_string(setting.rows), std::to_string(setting.length)};
  const char* program = std::getenv("TESSERA_PROGRAM");
  Peer ours({program ? program : source_folder() + "/build/tessera", "launch", "--nproc", std::to_string(kRanks), "--",
             self, "--rank", setting.model, sizes[0], sizes[1], setting.how});
  const std::vector<std::string> arguments = {setting.model, std::to_string(kRanks), sizes[0], sizes[1], setting.how};
  Peer peer("tp_step.py", arguments);
  Peer tuned("tp_step.py", arguments, {{"LD_PRELOAD", "libtcmalloc_minimal.so.4"}});  // the allocator that ours links
  const Json request = {{"steps", setting.steps}};
  Json last_ours = ours.ask(request), last_peer = peer.ask(request), last_tuned = tuned.ask(request);  // warm-up
  const auto agree = [&] {
    return std::abs(last_ours["loss"].get<double>() / last_peer["loss"].get<double>() - 1) < 1e-3;
  };
  const double tokens = static_cast<double>(setting.steps * setting.rows * setting.length);
  harness.threads = kRanks;
  harness.run({.name = name + " tokens/s",
               .unit = "tokens/s",
               .at_least = 1,
               .verified = agree,
               .ours = [&] { return tokens / (last_ours = ours.ask(request))["seconds"].get<double>(); },
               .peer = [&] { return tokens / (last_peer = peer.ask(request))["seconds"].get<double>(); },
               .tuned_peer = [&] { return tokens / (last_tuned = tuned.ask(request))["seconds"].get<double>(); }});
  harness.run({.name = name + " peak memory a rank",
               .unit = "MiB",
               .at_least = 1,
               .higher_is_better = false,
               .verified = agree,
               .ours = [&] { return largest_of(last_ours["peak_bytes"]) / (1 << 20); },
               .peer = [&] { return largest_of(last_peer["peak_bytes"]) / (1 << 20); },
               .tuned_peer = [&] { return largest_of(last_tuned["peak_bytes"]) / (1 << 20); }});
}

// A random Llama of SmolLM2-135M's widths, whose heads two ranks can share.
std::string write_wide_llama(const std::filesystem::path& folder) {
  const auto dir = folder / "wide_llama";
  const auto config = ModelConfig::parse(
      R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
      "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 72,
      "max_position_embeddings": 2048, "rms_norm_eps": 1e-05, "initializer_range": 0.02, "torch_dtype": "float32",
      "tie_word_embeddings": true})",
      "wide_llama");
  const auto model = make_model(config, {.device = c10::Device(at::kMeta)});
  init_weights(*model, 3);
  save_pretrained(*model, dir, {});
  return dir;
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera::bench;
  return bench_main("tp", [&] {
    if (argc == 6 && std::string(argv[1]) == "--rank")
      return rank_main(argv[2], std::stoll(argv[3]), std::stoll(argv[4]), argv[5]);
    Harness harness("tp", argc, argv);
    const char* assets = std::getenv("TESSERA_ASSETS");
    const std::string folder = assets ? assets : source_folder() + "/build/assets";
    const auto scratch = std::filesystem::temp_directory_path() / ("tessera-bench-tp-" + std::to_string(::getpid()));
    std::filesystem::create_directories(scratch);
    const auto wide = write_wide_llama(scratch);
    for (const char* how : {"tp", "sp", "dp"}) {
      measure(harness, argv[0], {"small Llama", folder + "/small_llama", how, 8, 256, 4});
      measure(harness, argv[0], {"wide Llama", wide, how, 4, 256, 1});
    }
    std::filesystem::remove_all(scratch);
    return harness.exit_code();
  });
}
