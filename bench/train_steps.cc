#include "bench/train_steps.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <map>
#include <sstream>

#include "tessera/base/ignored_label.h"
#include "tessera/base/machine/host.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/rendezvous/rendezvous.h"
#include "tessera/data/rows/batch.h"
#include "tessera/kernels/linear/linear.h"
#include "tessera/models/files/weights.h"
#include "tessera/optim/optimizer.h"
#include "tessera/parallel/parallelize_model.h"
#include "tessera/train/run/run_layout.h"
#include "tessera/train/run/run_mesh.h"
#include "tessera/train/step/step.h"

namespace tessera::bench {
namespace {

// What follows a StepCase's name in the names of its cases.
constexpr const char* kRate = ", tokens/s";
constexpr const char* kPeakMemory = ", peak memory per rank";
constexpr const char* kGemmShare = ", matrix products of a step vs. peak GEMM";
constexpr const char* kRateVsCompile = ", tokens/s vs. torch.compile";
constexpr const char* kFigures[] = {kRate, kPeakMemory, kGemmShare, kRateVsCompile};

data::Batch make_rows(int64_t first, int64_t rows, int64_t length, int64_t document_length, int64_t vocabulary) {
  const auto tokens =
      at::arange(first, first + rows * length, at::kLong).mul_(7919).remainder_(vocabulary).view({rows, length});
  const auto labels = at::full_like(tokens, kIgnoredLabel);
  labels.narrow(1, 0, length - 1).copy_(tokens.narrow(1, 1, length - 1));
  const auto row_positions = at::arange(length, at::kLong).expand({rows, length}).contiguous();
  if (document_length == 0) return data::make_batch(tokens, labels, row_positions, at::zeros_like(tokens));
  const auto positions = row_positions.remainder(document_length);
  labels.masked_fill_(positions.eq(document_length - 1), kIgnoredLabel);
  return data::make_batch(tokens, labels, positions, row_positions.div(document_length, "floor"));
}

bool is_schedule(const std::string& layout) {
  return layout.find_first_of("0123456789") == 0 || std::isupper(layout[0]) != 0;
}

train::Recipe recipe_of_layout(const std::string& layout, int64_t ranks) {
  train::Recipe recipe;
  auto& parallel = recipe.parallel;
  if (is_schedule(layout)) {
    parallel.pp = ranks;
    parallel.schedule = layout;
  } else {
    std::istringstream words(layout);
    for (std::string word; std::getline(words, word, '-');) {
      if (word == "sp" || word == "graphs") {
        (word == "sp" ? parallel.sequence_parallel : recipe.train.layer_graphs) = true;
        continue;
      }
      const int64_t size = std::stoll(word.substr(2));
      const auto name = word.substr(0, 2);
      (name == "tp"   ? parallel.tp
       : name == "cp" ? parallel.cp
       : name == "pp" ? parallel.pp
       : name == "ep" ? parallel.ep
       : name == "rp" ? parallel.dp_replicate
                      : parallel.dp_shard) = size;
    }
  }
  parallel.dp_shard = ranks / (parallel.dp_replicate * parallel.tp * parallel.cp * parallel.pp);
  return recipe;
}

// Returns the FLOPs of a step's matrix products: forward, and the gradients of both factors. The products are those
// with weights, queries times keys, and scores times values. A token attends to itself and the tokens before it in its
// document: on average `mean_keys` of them.
double matrix_product_flops(const StepCase& step_case) {
  const auto config = ModelConfig::from_folder(step_case.arguments[0]);
  const auto model = make_model(config, {.device = c10::Device(at::kMeta)});
  int64_t weights = 0;
  for (const auto& parameter : model->parameters()) weights += parameter.dim() == 2 ? parameter.numel() : 0;
  if (!config.tie_word_embeddings) weights -= config.vocab_size * config.hidden_size;  // the embedding is a lookup
  const auto tokens = static_cast<double>(step_case.tokens);
  const int64_t length = step_case.document_length > 0 ? step_case.document_length : std::stoll(step_case.arguments[2]);
  const double mean_keys = static_cast<double>(length + 1) / 2;
  const auto heads = static_cast<double>(config.num_hidden_layers * config.num_attention_heads * config.head_dim);
  return (step_case.only_adapters ? 4.0 : 6.0) * static_cast<double>(weights) * tokens +
         6.0 * 2 * heads * mean_keys * tokens;
}

double largest_mebibytes(const Json& answer) {
  double peak = 0;
  for (const auto& bytes : answer["peak_bytes"]) peak = std::max(peak, bytes.get<double>());
  return peak / (1 << 20);
}

}  // namespace

void serve_steps(CausalLM& model, comm::World& world, const StepRows& rows) {
  const auto optimizer = optim::make_adamw(model, {.lr = 1e-4, .beta1 = 0.9, .beta2 = 0.95, .weight_decay = 0.1});
  train::TrainStep step(model, *optimizer, world.group(),
                        {.max_grad_norm = rows.optimizer_in_backward ? 0.0 : 1.0,
                         .early_step = rows.optimizer_in_backward,
                         .is_counted = rows.is_counted,
                         .pipeline = rows.pipeline});
  const int64_t micro_batch_rows = rows.rows / rows.micro_batches;
  const auto micro_batches = [&](int64_t first) {
    std::vector<data::Batch> batches;
    for (int64_t i = 0; i < rows.micro_batches; ++i) {
      auto batch = make_rows(first + i * micro_batch_rows * rows.length, micro_batch_rows, rows.length,
                             rows.document_length, model.config().vocab_size);
      batches.push_back(rows.local_tokens ? rows.local_tokens(batch) : batch);
    }
    return batches;
  };
  int64_t done = 0;
  while (true) {
    std::string line;
    if (world.rank() == 0 && !std::getline(std::cin, line)) line = "{\"steps\": 0}";
    const auto steps = Json::parse(comm::broadcast_bytes(*world.group(), line)).at("steps").get<int64_t>();
    if (steps == 0) return;
    comm::barrier(*world.group());
    if (rows.kernel_names) rows.kernel_names();  // discards the launches before these steps
    double loss = 0;
    const double seconds = seconds_of([&] {
      for (int64_t i = 0; i < steps; ++i, ++done) {
        const int64_t first = (done * rows.data_ranks + rows.data_rank) * rows.rows * rows.length;
        loss = step.run(micro_batches(first), 1e-4).loss;
      }
    });
    std::vector<int64_t> peaks;
    for (const auto& each : comm::all_gather_bytes(*world.group(), std::to_string(train::peak_resident_bytes()))) {
      peaks.push_back(std::stoll(each));
    }
    Json answer = {{"seconds", seconds}, {"loss", loss}, {"peak_bytes", peaks}};
    if (rows.kernel_names) {
      const auto names = rows.kernel_names();
      answer["launches"] = static_cast<double>(names.size()) / static_cast<double>(steps);
      std::map<std::string, int> launch_counts;
      for (const auto& name : names) ++launch_counts[name];
      answer["kernels"] = launch_counts;
    }
    if (world.rank() == 0) std::cout << answer.dump() << std::endl;
  }
}

std::optional<LayoutRank> parse_layout_rank(int argc, char** argv) {
  if (argc < 6 || argc > 7 || std::string(argv[1]) != "--rank") return std::nullopt;
  LayoutRank requested{.model = argv[2], .rows = std::stoll(argv[3]), .length = std::stoll(argv[4]), .layout = argv[5]};
  if (argc == 7) requested.micro_batches = std::stoll(argv[6]);
  return requested;
}

int serve_layout(const LayoutRank& options) {
  const auto world = comm::World::connect({});
  const auto recipe = recipe_of_layout(options.layout, world->size());
  const auto& parallel = recipe.parallel;
  const train::RunLayout run_layout{.dp_replicate = parallel.dp_replicate,
                                    .dp_shard = parallel.dp_shard,
                                    .tp = parallel.tp,
                                    .cp = parallel.cp,
                                    .pp = parallel.pp,
                                    .ep = parallel.ep};
  const train::RunMesh run_mesh(run_layout, options.device, world);
  const auto config = ModelConfig::from_folder(options.model);
  const auto stages = train::pipeline_options(recipe, config, run_mesh.mesh());
  const auto model = make_parallel_model(config, at::kFloat,
                                         {.mesh = run_mesh.mesh(),
                                          .ep = parallel.ep,
                                          .cp_rotate_method = "alltoall",
                                          .sequence_parallel = parallel.sequence_parallel,
                                          .layer_graphs = recipe.train.layer_graphs},
                                         stages);
  load_pretrained(*model, options.model);
  serve_steps(*model, *world,
              {.rows = options.rows / run_mesh.data_size(),
               .length = options.length,
               .data_ranks = run_mesh.data_size(),
               .data_rank = run_mesh.data_rank(),
               .is_counted = run_mesh.is_counted(),
               .micro_batches = std::max<int64_t>(options.micro_batches / run_mesh.data_size(), 1),
               .local_tokens = [&](const data::Batch& batch) { return run_mesh.local_tokens(batch); },
               .pipeline = stages,
               .kernel_names = options.kernel_names});
  return 0;
}

void serve_gemm_peak(const std::string& dtype) {
  at::set_num_threads(usable_cores());
  constexpr int64_t kSize = 2048;
  const auto type = dtype == "bfloat16" ? at::kBFloat16 : at::kFloat;
  const auto x = at::randn({kSize, kSize}).to(type), weight = at::randn({kSize, kSize}).to(type);
  const double gigaflop = 2.0 * kSize * kSize * kSize * 1e-9;
  const at::NoGradGuard no_grad;
  const std::vector<std::function<at::Tensor()>> gemms = {[&] { return at::mm(x, weight); },
                                                          [&] { return at::linear(x, weight); },
                                                          [&] { return tessera::kernels::linear(x, weight); }};
  for (std::string line; std::getline(std::cin, line);) {
    double best = 0;
    for (int i = 0; i < 3; ++i) {
      for (const auto& gemm : gemms) best = std::max(best, gigaflop / seconds_of([&] { gemm(); }));
    }
    std::cout << Json({{"rate", best}}).dump() << std::endl;
  }
}

std::string write_random_model(const std::filesystem::path& dir, const std::string& config) {
  const auto model = make_model(ModelConfig::parse(config, dir.filename()), {.device = c10::Device(at::kMeta)});
  init_weights(*model, 3);
  save_pretrained(*model, dir, {});
  return dir;
}

std::vector<std::string> launch_command(const std::string& self, int ranks, const std::vector<std::string>& arguments) {
  const char* program = std::getenv("TESSERA_PROGRAM");
  std::vector<std::string> command = {program ? program : source_folder() + "/build/tessera",
                                      "launch",
                                      "--nproc",
                                      std::to_string(ranks),
                                      "--",
                                      self,
                                      "--rank"};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return command;
}

void measure_steps(Harness& harness, const std::string& self, const StepCase& step_case) {
  const bool is_selected =
      std::ranges::any_of(kFigures, [&](const char* figure) { return harness.is_selected(step_case.name + figure); });
  if (!is_selected) return;
  auto arguments = step_case.peer_arguments.empty() ? step_case.arguments : step_case.peer_arguments;
  arguments.insert(arguments.begin() + 1, std::to_string(step_case.ranks));
  Peer ours(launch_command(self, step_case.ranks, step_case.arguments));
  const Peer::Environment allocator = {{"LD_PRELOAD", "libtcmalloc_minimal.so.4"}};  // our program links this allocator
  auto peer = std::make_unique<Peer>(step_case.peer, arguments);
  auto tuned = std::make_unique<Peer>(step_case.peer, arguments, allocator);
  const Json request = {{"steps", step_case.steps}};
  // Warm-up. From now on ours and the peer run the same steps.
  Json last_ours = ours.ask(request), last_peer = peer->ask(request), last_tuned = tuned->ask(request);
  const auto agree = [&] {
    return std::abs(last_ours["loss"].get<double>() / last_peer["loss"].get<double>() - 1) < step_case.loss_tolerance;
  };
  const auto tokens = static_cast<double>(step_case.steps * step_case.tokens);
  harness.threads = step_case.ranks;
  const auto our_rate = [&](double work) { return work / (last_ours = ours.ask(request))["seconds"].get<double>(); };
  harness.run({.name = step_case.name + kRate,
               .unit = "tokens/s",
               .at_least = step_case.min_speedup,
               .verified = agree,
               .ours = [&] { return our_rate(tokens); },
               .peer = [&] { return tokens / (last_peer = peer->ask(request))["seconds"].get<double>(); },
               .tuned_peer = [&] { return tokens / (last_tuned = tuned->ask(request))["seconds"].get<double>(); }});
  harness.run({.name = step_case.name + kPeakMemory,
               .unit = "MiB",
               .at_least = 1 / step_case.max_memory_ratio,
               .higher_is_better = false,
               .verified = agree,
               .ours = [&] { return largest_mebibytes(last_ours); },
               .peer = [&] { return largest_mebibytes(last_peer); },
               .tuned_peer = [&] { return largest_mebibytes(last_tuned); }});
  const bool agreed = agree();  // checked now, since the next case runs only our steps
  peer.reset();                 // frees its memory
  tuned.reset();
  if (step_case.min_gemm_share >= 0) {
    Peer gemm_peak(std::vector<std::string>{self, "--peak", step_case.dtype});
    const double gigaflop = static_cast<double>(step_case.steps) * matrix_product_flops(step_case) * 1e-9;
    harness.run({.name = step_case.name + kGemmShare,
                 .unit = "GFLOP/s",
                 .at_least = step_case.min_gemm_share,
                 .verified = [&] { return agreed; },
                 .ours = [&] { return our_rate(gigaflop); },
                 .peer = [&] { return gemm_peak.ask(request)["rate"].get<double>(); }});
  }
  if (!step_case.compare_with_compile) return;
  auto environment = allocator;
  environment.emplace_back("TESSERA_PEER_COMPILES", "1");
  Peer compiled_peer(step_case.peer, arguments, environment);
  Peer new_ranks(launch_command(self, step_case.ranks, step_case.arguments));  // so that both start at the same step
  for (int i = 0; i < 2; ++i) {  // warm-up, in which torch.compile compiles
    last_ours = new_ranks.ask(request);
    last_peer = compiled_peer.ask(request);
  }
  harness.run({.name = step_case.name + kRateVsCompile,
               .unit = "tokens/s",
               .verified = agree,
               .ours = [&] { return tokens / (last_ours = new_ranks.ask(request))["seconds"].get<double>(); },
               .peer = [&] { return tokens / (last_peer = compiled_peer.ask(request))["seconds"].get<double>(); }});
}

}  // namespace tessera::bench
