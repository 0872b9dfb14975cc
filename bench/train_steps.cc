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

data::Batch rows_from(int64_t first, int64_t rows, int64_t length, int64_t document, int64_t vocabulary) {
  const auto tokens =
      at::arange(first, first + rows * length, at::kLong).mul_(7919).remainder_(vocabulary).view({rows, length});
  const auto labels = at::full_like(tokens, kIgnoredLabel);
  labels.narrow(1, 0, length - 1).copy_(tokens.narrow(1, 1, length - 1));
  const auto places = at::arange(length, at::kLong).expand({rows, length}).contiguous();
  if (document == 0) return data::make_batch(tokens, labels, places, at::zeros_like(tokens));
  const auto positions = places.remainder(document);
  labels.masked_fill_(positions.eq(document - 1), kIgnoredLabel);
  return data::make_batch(tokens, labels, positions, places.div(document, "floor"));
}

bool is_schedule(const std::string& how) { return how.find_first_of("0123456789") == 0 || std::isupper(how[0]) != 0; }

train::Recipe recipe_of(const std::string& how, int64_t ranks) {
  train::Recipe recipe;
  auto& parallel = recipe.parallel;
  if (is_schedule(how)) {
    parallel.pp = ranks;
    parallel.schedule = how;
  } else {
    std::istringstream words(how);
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

// Returns the floating-point operations of a step's matrix products: forward, and the gradients of both factors.
// Counted are the products with weights, queries times keys, and scores times values. A token attends to the tokens
// before it in its document.
double products_of(const StepCase& given) {
  const auto config = ModelConfig::from_folder(given.words[0]);
  const auto model = make_model(config, {.device = c10::Device(at::kMeta)});
  int64_t weights = 0;
  for (const auto& parameter : model->parameters()) weights += parameter.dim() == 2 ? parameter.numel() : 0;
  if (!config.tie_word_embeddings) weights -= config.vocab_size * config.hidden_size;  // the embedding is a lookup
  const auto tokens = static_cast<double>(given.tokens);
  const int64_t length = given.document > 0 ? given.document : std::stoll(given.words[2]);
  const double seen = static_cast<double>(length + 1) / 2;
  const auto heads = static_cast<double>(config.num_hidden_layers * config.num_attention_heads * config.head_dim);
  return (given.only_adapters ? 4.0 : 6.0) * static_cast<double>(weights) * tokens + 6.0 * 2 * heads * seen * tokens;
}

double largest_mebibytes(const Json& answer) {
  double most = 0;
  for (const auto& each : answer["peak_bytes"]) most = std::max(most, each.get<double>());
  return most / (1 << 20);
}

}  // namespace

void serve_steps(CausalLM& model, comm::World& world, const StepRows& rows) {
  const auto optimizer = optim::make_adamw(model, {.lr = 1e-4, .beta1 = 0.9, .beta2 = 0.95, .weight_decay = 0.1});
  train::TrainStep step(model, *optimizer, world.group(),
                        {.max_grad_norm = rows.early ? 0.0 : 1.0,
                         .early_step = rows.early,
                         .is_counted = rows.is_counted,
                         .pipeline = rows.pipeline});
  const int64_t at_once = rows.rows / rows.micro_batches;
  const auto micro_batches = [&](int64_t first) {
    std::vector<data::Batch> batches;
    for (int64_t i = 0; i < rows.micro_batches; ++i) {
      auto batch =
          rows_from(first + i * at_once * rows.length, at_once, rows.length, rows.document, model.config().vocab_size);
      batches.push_back(rows.own ? rows.own(batch) : batch);
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
    if (rows.kernels) rows.kernels();
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
    if (rows.kernels) {
      const auto names = rows.kernels();
      answer["launches"] = static_cast<double>(names.size()) / static_cast<double>(steps);
      std::map<std::string, int> times;
      for (const auto& name : names) ++times[name];
      answer["kernels"] = times;
    }
    if (world.rank() == 0) std::cout << answer.dump() << std::endl;
  }
}

std::optional<LayoutRank> rank_asked_for(int argc, char** argv) {
  if (argc < 6 || argc > 7 || std::string(argv[1]) != "--rank") return std::nullopt;
  LayoutRank asked{.model = argv[2], .rows = std::stoll(argv[3]), .length = std::stoll(argv[4]), .how = argv[5]};
  if (argc == 7) asked.micro_batches = std::stoll(argv[6]);
  return asked;
}

int serve_layout(const LayoutRank& given) {
  const auto world = comm::World::connect({});
  const auto recipe = recipe_of(given.how, world->size());
  const auto& parallel = recipe.parallel;
  const train::RunLayout layout{.dp_replicate = parallel.dp_replicate,
                                .dp_shard = parallel.dp_shard,
                                .tp = parallel.tp,
                                .cp = parallel.cp,
                                .pp = parallel.pp,
                                .ep = parallel.ep};
  const train::RunMesh run_mesh(layout, given.device, world);
  const auto config = ModelConfig::from_folder(given.model);
  const auto stages = train::pipeline_options(recipe, config, run_mesh.mesh());
  const auto model = make_parallel_model(config, at::kFloat,
                                         {.mesh = run_mesh.mesh(),
                                          .ep = parallel.ep,
                                          .cp_rotate_method = "alltoall",
                                          .sequence_parallel = parallel.sequence_parallel,
                                          .layer_graphs = recipe.train.layer_graphs},
                                         stages);
  load_pretrained(*model, given.model);
  serve_steps(*model, *world,
              {.rows = given.rows / run_mesh.data_size(),
               .length = given.length,
               .data_ranks = run_mesh.data_size(),
               .data_rank = run_mesh.data_rank(),
               .is_counted = run_mesh.is_counted(),
               .micro_batches = std::max<int64_t>(given.micro_batches / run_mesh.data_size(), 1),
               .own = [&](const data::Batch& batch) { return run_mesh.local_tokens(batch); },
               .pipeline = stages,
               .kernels = given.kernels});
  return 0;
}

void serve_peak(const std::string& dtype) {
  at::set_num_threads(usable_cores());
  constexpr int64_t kSize = 2048;
  const auto type = dtype == "bfloat16" ? at::kBFloat16 : at::kFloat;
  const auto x = at::randn({kSize, kSize}).to(type), weight = at::randn({kSize, kSize}).to(type);
  const double gigaflop = 2.0 * kSize * kSize * kSize * 1e-9;
  const at::NoGradGuard no_grad;
  const std::vector<std::function<at::Tensor()>> ways = {[&] { return at::mm(x, weight); },
                                                         [&] { return at::linear(x, weight); },
                                                         [&] { return tessera::kernels::linear(x, weight); }};
  for (std::string line; std::getline(std::cin, line);) {
    double most = 0;
    for (int i = 0; i < 3; ++i) {
      for (const auto& way : ways) most = std::max(most, gigaflop / seconds_of([&] { way(); }));
    }
    std::cout << Json({{"rate", most}}).dump() << std::endl;
  }
}

std::string write_random_model(const std::filesystem::path& dir, const std::string& config) {
  const auto model = make_model(ModelConfig::parse(config, dir.filename()), {.device = c10::Device(at::kMeta)});
  init_weights(*model, 3);
  save_pretrained(*model, dir, {});
  return dir;
}

std::vector<std::string> launched(const std::string& self, int ranks, const std::vector<std::string>& words) {
  const char* program = std::getenv("TESSERA_PROGRAM");
  std::vector<std::string> command = {program ? program : source_folder() + "/build/tessera",
                                      "launch",
                                      "--nproc",
                                      std::to_string(ranks),
                                      "--",
                                      self,
                                      "--rank"};
  command.insert(command.end(), words.begin(), words.end());
  return command;
}

void measure_steps(Harness& harness, const std::string& self, const StepCase& given) {
  if (!harness.wants(given.name)) return;
  auto arguments = given.peer_words.empty() ? given.words : given.peer_words;
  arguments.insert(arguments.begin() + 1, std::to_string(given.ranks));
  Peer ours(launched(self, given.ranks, given.words));
  const Peer::Environment allocator = {
      {"LD_PRELOAD", "libtcmalloc_minimal.so.4"}};  // the allocator that our program links
  auto peer = std::make_unique<Peer>(given.peer, arguments);
  auto tuned = std::make_unique<Peer>(given.peer, arguments, allocator);
  const Json request = {{"steps", given.steps}};
  // Warm-up. From here on ours and the peer run the same steps.
  Json last_ours = ours.ask(request), last_peer = peer->ask(request), last_tuned = tuned->ask(request);
  const auto agree = [&] {
    return std::abs(last_ours["loss"].get<double>() / last_peer["loss"].get<double>() - 1) < given.loss_within;
  };
  const auto tokens = static_cast<double>(given.steps * given.tokens);
  harness.threads = given.ranks;
  const auto our_rate = [&](double work) { return work / (last_ours = ours.ask(request))["seconds"].get<double>(); };
  harness.run({.name = given.name + " tokens/s",
               .unit = "tokens/s",
               .at_least = given.faster_at_least,
               .verified = agree,
               .ours = [&] { return our_rate(tokens); },
               .peer = [&] { return tokens / (last_peer = peer->ask(request))["seconds"].get<double>(); },
               .tuned_peer = [&] { return tokens / (last_tuned = tuned->ask(request))["seconds"].get<double>(); }});
  harness.run({.name = given.name + " peak memory a rank",
               .unit = "MiB",
               .at_least = 1 / given.memory_at_most,
               .higher_is_better = false,
               .verified = agree,
               .ours = [&] { return largest_mebibytes(last_ours); },
               .peer = [&] { return largest_mebibytes(last_peer); },
               .tuned_peer = [&] { return largest_mebibytes(last_tuned); }});
  const bool agreed = agree();  // after equally many steps; the next case runs only our steps
  peer.reset();                 // frees memory
  tuned.reset();
  if (given.peak_share >= 0) {
    Peer peak(std::vector<std::string>{self, "--peak", given.dtype});
    const double gigaflop = static_cast<double>(given.steps) * products_of(given) * 1e-9;
    harness.run({.name = given.name + " products of a step, beside their peak",
                 .unit = "GFLOP/s",
                 .at_least = given.peak_share,
                 .verified = [&] { return agreed; },
                 .ours = [&] { return our_rate(gigaflop); },
                 .peer = [&] { return peak.ask(request)["rate"].get<double>(); }});
  }
  if (!given.compiled) return;
  auto environment = allocator;
  environment.emplace_back("TESSERA_PEER_COMPILES", "1");
  Peer compiled(given.peer, arguments, environment);
  Peer again(launched(self, given.ranks, given.words));  // new ranks, so that both run the same steps
  for (int i = 0; i < 2; ++i) {                          // the second request compiles no more graphs
    last_ours = again.ask(request);
    last_peer = compiled.ask(request);
  }
  harness.run({.name = given.name + " tokens/s, beside torch.compile",
               .unit = "tokens/s",
               .verified = agree,
               .ours = [&] { return tokens / (last_ours = again.ask(request))["seconds"].get<double>(); },
               .peer = [&] { return tokens / (last_peer = compiled.ask(request))["seconds"].get<double>(); }});
}

}  // namespace tessera::bench
