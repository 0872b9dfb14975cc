// Tests of two hosts that differ in every property that may influence decisions: ranks (4 and 2), cores (2 and 1), and
// the address of the master's name (loopback on its own host). All ranks must make the same decisions, and the results
// are those of one host.
#include <ATen/ATen.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/files/file.h"
#include "tessera/comm/launch/launcher.h"
#include "tessera/comm/rendezvous/rendezvous.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tests/support/process.h"
#include "tests/support/two_hosts.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;
using testing::asset;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::program;
using testing::run_process;
using testing::TempFolder;

constexpr int kRanks = 6;
constexpr const char* kRanksOfHosts = "4,2";
constexpr int kCoresOfHosts[] = {2, 1};

// Limits this process and its children to `count` cores: always the same cores, or all cores if there are fewer.
void use_cores(int count) {
  cpu_set_t all, some;
  if (::sched_getaffinity(0, sizeof all, &all) != 0) return;
  CPU_ZERO(&some);
  for (int core = 0; core < CPU_SETSIZE && CPU_COUNT(&some) < count; ++core) {
    if (CPU_ISSET(core, &all)) CPU_SET(core, &some);
  }
  ::sched_setaffinity(0, sizeof some, &some);
}

// All lists of `length` placements out of `placements`.
std::vector<Placements> lists_of(const std::vector<Placement>& placements, size_t length) {
  std::vector<Placements> lists = {{}};
  for (size_t i = 0; i < length; ++i) {
    std::vector<Placements> longer;
    for (const Placements& list : lists) {
      for (const Placement& placement : placements) {
        longer.push_back(list);
        longer.back().push_back(placement);
      }
    }
    lists = std::move(longer);
  }
  return lists;
}

// `whole` with these placements. For Partial the first rank has the value and the other ranks have zeros.
at::Tensor placed(const at::Tensor& whole, const MeshPtr& mesh, const Placements& placements) {
  Placements without_partial = placements;
  bool mine = true;
  for (size_t i = 0; i < placements.size(); ++i) {
    if (!placements[i].is_partial()) continue;
    without_partial[i] = Replicate();
    mine = mine && mesh->local_rank(static_cast<int64_t>(i)) == 0;
  }
  at::Tensor local = to_local(distribute_tensor(whole, mesh, without_partial, std::nullopt)).clone();
  if (!mine) local.zero_();
  return from_local(local, mesh, placements, {.shape = whole.sizes().vec(), .stride = whole.strides().vec()});
}

// Every redistribution between these placements keeps the values.
void redistribute_everything(const std::shared_ptr<comm::World>& world) {
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{6}, {2, 3}, {3, 2}}) {
    const MeshPtr mesh = init_device_mesh(world, "cpu", shape);
    for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{7, 5}, {1200, 600}}) {
      const at::Tensor whole = at::arange(sizes[0] * sizes[1]).remainder(251).to(at::kFloat).view(sizes);
      for (const Placements& from : lists_of({Replicate(), Shard(0), Shard(1), Partial()}, shape.size())) {
        for (const Placements& to : lists_of({Replicate(), Shard(0), Shard(1)}, shape.size())) {
          const at::Tensor moved = redistribute(placed(whole, mesh, from), to);
          TESSERA_CHECK(at::equal(full_tensor(moved), whole), ErrorKind::kInternal, "[test] {}: {} to {}",
                        fmt::join(sizes, "x"), to_string(from), to_string(to));
        }
      }
    }
  }
}

// Not a test by itself: the code that each rank of a host runs.
TEST(DISABLED_HeterogeneousHostRank, Main) {
  int code = 0;
  try {
    const auto world = comm::World::connect({.timeout = std::chrono::seconds(60), .check = "always"});
    const comm::HostSummary& hosts = world->info().hosts;
    TESSERA_CHECK(
        hosts.count == 2 && hosts.least_ranks == 2 && hosts.most_ranks == 4 && hosts.least_cores_per_rank == 0,
        ErrorKind::kInternal, "[test] {} hosts, {} to {} ranks, {} cores a rank", hosts.count, hosts.least_ranks,
        hosts.most_ranks, hosts.least_cores_per_rank);
    redistribute_everything(world);
    std::fprintf(stderr, "rank %d is done\n", world->rank());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    code = exit_code_for(error);
  }
  std::fflush(nullptr);
  std::_Exit(code);
}

class HeterogeneousHosts : public testing::TwoHostsTest {
 protected:
  // Runs `arguments` in all ranks of both hosts.
  void run(const std::vector<std::string>& arguments) {
    resolve(0, "first.invalid", "127.0.1.1");
    resolve(1, "first.invalid", "10.77.0.1");
    start([=](int number) {
      use_cores(kCoresOfHosts[number]);
      return comm::launch_local_ranks(arguments, {.nproc_of_hosts = comm::expand_tasks_per_node(kRanksOfHosts),
                                                  .nnodes = 2,
                                                  .node_rank = number,
                                                  .master = "first.invalid:29471"});
    });
    if (IsSkipped() || HasFatalFailure()) return;
    for (const auto& host : hosts_) host->go();
    for (const auto& host : hosts_) EXPECT_EQ(host->wait(), 0) << host->said();
    EXPECT_THAT(hosts_[0]->said() + hosts_[1]->said(), Not(HasSubstr("[comm.watchdog]")));
  }

  // A tiny Llama with random weights and the tokenizer of SmolLM2.
  fs::path write_recipe() const {
    const auto model = folder_ / "tiny";
    fs::create_directories(model);
    for (const char* name : {"tokenizer.json", "tokenizer_config.json"}) {
      publish_file(model / name, read_file(asset("smollm2") / name));
    }
    publish_file(model / "config.json",
                 R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "initializer_range": 0.1, "torch_dtype": "float32", "rms_norm_eps": 1e-05,
    "tie_word_embeddings": true, "bos_token_id": 1, "eos_token_id": 2})");
    const auto path = folder_ / "recipe.yaml";
    std::ofstream(path) << fmt::format(R"(
model: {{path: {}, init: random}}
data: {{train: [{}], format: chat, sequence_length: 64}}
optimizer: {{lr: 3.0e-3, max_grad_norm: 1.0}}
schedule: {{warmup_steps: 2}}
train: {{steps: 4, global_batch_size: 12, local_batch_size: 1, validate_every: 0}}
checkpoint: {{every: 0, export: final}}
log: {{tensorboard: false}}
)",
                                       model.string(), asset("text/dialogues.jsonl").string());
    return path;
  }

  static std::vector<nlohmann::json> metrics(const fs::path& dir) {
    std::vector<nlohmann::json> steps;
    std::ifstream lines(dir / "metrics.jsonl");
    for (std::string line; std::getline(lines, line);) steps.push_back(nlohmann::json::parse(line));
    return steps;
  }

  // Trains on both hosts and on one host, and compares the results.
  void expect_results_of_one_host(const std::vector<std::string>& parallel) {
    const auto recipe = write_recipe();
    const auto command = [&](const fs::path& dir) {
      std::vector<std::string> words = {program(), "train", recipe.string(), "checkpoint.dir=" + dir.string()};
      words.insert(words.end(), parallel.begin(), parallel.end());
      return words;
    };
    run(command(folder_ / "two"));
    if (IsSkipped() || HasFailure()) return;
    auto alone = command(folder_ / "one");
    alone.insert(alone.begin() + 3, {"--nproc", std::to_string(kRanks)});
    const auto one_host = run_process(alone);
    ASSERT_EQ(one_host.exit_code, 0) << one_host.err;
    const auto ours = metrics(folder_ / "two"), theirs = metrics(folder_ / "one");
    ASSERT_EQ(ours.size(), 4U);
    ASSERT_EQ(theirs.size(), 4U);
    for (size_t i = 0; i < ours.size(); ++i) {
      const double loss = theirs[i]["loss"], norm = theirs[i]["grad_norm"];
      EXPECT_NEAR(ours[i]["loss"].get<double>(), loss, 1e-5 * std::abs(loss)) << "step " << i + 1;
      EXPECT_NEAR(ours[i]["grad_norm"].get<double>(), norm, 1e-4 * norm) << "step " << i + 1;
    }
  }
};

TEST_F(HeterogeneousHosts, RedistributeKeepsValues) {
  run({fs::read_symlink("/proc/self/exe").string(), "--gtest_also_run_disabled_tests",
       "--gtest_filter=DISABLED_HeterogeneousHostRank.Main", "--gtest_brief=1"});
  if (IsSkipped() || HasFatalFailure()) return;
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_THAT(hosts_[rank < 4 ? 0 : 1]->said(), HasSubstr(fmt::format("rank {} is done", rank)));
  }
}

TEST_F(HeterogeneousHosts, FsdpTrainsAsOneHost) { expect_results_of_one_host({}); }

TEST_F(HeterogeneousHosts, HsdpTrainsAsOneHost) {
  expect_results_of_one_host({"parallel.dp_replicate=2", "parallel.dp_shard=3"});
}

}  // namespace
}  // namespace tessera::train
