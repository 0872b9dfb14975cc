// Compares saving, loading and gathering the sharded state of 2 ranks with torch.distributed.checkpoint. Measured are
// the GB/s of the state's bytes, the extra memory, and how long an asynchronous save delays training. Ours and the peer
// call fsync for all files. The states are 302 MB of optimizer moments, and SmolLM2-135M with both moments of AdamW
// (1.6 GB).
//
//   bench_checkpoint               the harness; it starts our ranks and the peer's ranks, which answer requests
//   bench_checkpoint --ranks N     launches our N ranks
//   bench_checkpoint --rank        one of our ranks
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <thread>

#include "bench/harness.h"
#include "bench/over_ranks.h"
#include "tessera/base/error.h"
#include "tessera/base/files/staged.h"
#include "tessera/base/text/random_hex.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/launch/launcher.h"
#include "tessera/comm/rendezvous/rendezvous.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/formats/tensor_files/tensor_files.h"
#include "tessera/state/gather_state_dict.h"

namespace tessera::bench {
namespace {

namespace fs = std::filesystem;

constexpr int kRanks = 2;
constexpr int64_t kTensors = 72, kRows = 1024, kColumns = 1024;  // 302 MB: two states of 38 M parameters
constexpr int64_t kTokens = 32;                                  // tokens of the step that runs during a save

using Shapes = std::vector<std::pair<std::string, std::vector<int64_t>>>;

// Returns the names and shapes of the state's tensors: the weights in the file `weights` and both moments of AdamW. If
// `weights` is empty, the state is 302 MB of moments.
Shapes state_shapes(const std::string& weights) {
  Shapes shapes;
  if (weights.empty()) {
    for (int64_t i = 0; i < kTensors; ++i) {
      shapes.push_back({fmt::format("optim.state.w{}.exp_avg", i), {kRows, kColumns}});
    }
    return shapes;
  }
  const auto files = TensorFiles::open(weights);
  for (const auto& [name, stored] : files->tensors()) {
    shapes.push_back({"model." + name, stored.shape});
    for (const char* moment : {"exp_avg", "exp_avg_sq"}) {
      shapes.push_back({fmt::format("optim.state.{}.{}", name, moment), stored.shape});
    }
  }
  return shapes;
}

// Makes the state in float32, sharded along dim 0.
NamedTensors make_state(const MeshPtr& mesh, const Shapes& shapes) {
  NamedTensors state;
  for (const auto& [name, shape] : shapes) {
    const auto whole = at::full(shape, static_cast<float>(state.size() + 1));
    state.emplace_back(name, distribute_tensor(whole, mesh, {Shard(0)}, std::nullopt));
  }
  return state;
}

bool has_expected_values(const NamedTensors& state) {
  for (size_t i = 0; i < state.size(); ++i) {
    if (!to_local(state[i].second).eq(static_cast<float>(i + 1)).all().item<bool>()) return false;
  }
  return true;
}

// Returns the resident memory of the process without memory-mapped files.
int64_t resident_bytes() {
  std::ifstream status("/proc/self/status");
  int64_t kib = 0;
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("RssAnon:") || line.starts_with("RssShmem:")) {
      kib += std::stoll(line.substr(line.find(':') + 1));
    }
  }
  return kib * 1024;
}

// Measures the largest increase of resident_bytes() since construction, by polling every 2 ms.
class PeakMemory {
 public:
  PeakMemory() : before_(resident_bytes()), thread_([this] { watch(); }) {}
  int64_t stop() {
    stopped_ = true;
    thread_.join();
    return peak_ - before_;
  }

 private:
  void watch() {
    while (!stopped_) {
      peak_ = std::max(peak_, resident_bytes());
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    peak_ = std::max(peak_, resident_bytes());
  }
  int64_t before_, peak_ = 0;
  std::atomic<bool> stopped_{false};
  std::thread thread_;
};

// Writes the bytes of the state to one file per rank, with fsync.
void write_with_fsync(const fs::path& folder, int rank, const NamedTensors& state) {
  StagedFile file(folder / fmt::format("plain-{}", rank));
  uint64_t at = 0;
  for (const auto& [name, tensor] : state) {
    const auto local = to_local(tensor);
    file.write_at(at, {static_cast<const std::byte*>(local.const_data_ptr()), local.nbytes()});
    at += local.nbytes();
  }
  file.publish();
}

class Rank {
 public:
  Rank() : world_(comm::World::connect({.timeout = std::chrono::hours(1)})), group_(*world_->group()) {}

  int serve() {
    for (;;) {
      std::string line;
      if (group_.rank() == 0 && !std::getline(std::cin, line)) line = R"({"op": ""})";
      const Json request = Json::parse(comm::broadcast_bytes(group_, line));
      const std::string op = request.at("op");
      if (op.empty()) return 0;
      Json answer;
      if (op == "state") {
        set_state(request.at("weights").get<std::string>(), answer);
      } else {
        comm::barrier(group_);
        result_bytes_ = 0;
        PeakMemory memory;
        const double seconds = measure(op, request.at("folder").get<std::string>(), answer);
        answer["extra_bytes"] = max_over_ranks(group_, static_cast<double>(memory.stop() - result_bytes_));
        answer["seconds"] = max_over_ranks(group_, seconds);
      }
      if (group_.rank() == 0) std::cout << answer.dump() << std::endl;
      comm::barrier(group_);
    }
  }

 private:
  void set_state(const std::string& weights, Json& answer) {
    writer_.reset();
    async_writer_.reset();
    state_.clear();
    const auto shapes = state_shapes(weights);
    state_ = make_state(init_device_mesh(world_, "cpu", {world_->size()}), shapes);
    int64_t bytes = 0;
    for (const auto& [name, tensor] : state_) bytes += tensor.numel() * 4;
    answer["bytes"] = bytes;
  }

  double measure(const std::string& op, const fs::path& folder, Json& answer) {
    comm::barrier(group_);
    if (op == "write") return seconds_of([&] { write_with_fsync(folder, group_.rank(), state_); });
    if (op == "save") {
      if (!writer_) writer_ = make_writer(folder / "ours", false);
      return seconds_of([&] { writer_->save(++step_, state_, {}); });
    }
    if (op == "step") return seconds_of([&] { forward_and_backward(); });
    if (op == "stall" || op == "step_during_save") {
      // The time between two optimizer steps: save(), forward and backward, wait_for_snapshot(). The stall is this time
      // without forward and backward. finish() is not measured.
      if (!async_writer_) async_writer_ = make_writer(folder / "async", true);
      const double save = seconds_of([&] { async_writer_->save(++step_, state_, {}); });
      const double step = seconds_of([&] { forward_and_backward(); });
      const double wait = seconds_of([&] { async_writer_->wait_for_snapshot(); });
      async_writer_->finish();
      return op == "stall" ? save + wait : save + step + wait;
    }
    if (op == "load") {
      for (const auto& [name, tensor] : state_) to_local(tensor).zero_();
      comm::barrier(group_);
      const double seconds = seconds_of([&] { Checkpoint::latest(folder / "ours")->load(state_); });
      answer["right"] = true_on_all_ranks(group_, has_expected_values(state_));
      return seconds;
    }
    if (op == "gather") return gather(answer);
    throw std::runtime_error("unknown operation " + op);
  }

  // Computes the matrix products of a step of kTokens tokens, with the state's matrices as weights.
  void forward_and_backward() const {
    const at::NoGradGuard no_grad;
    for (const auto& [name, tensor] : state_) {
      const auto weight = to_local(tensor);
      if (weight.dim() != 2) continue;
      const auto input = at::ones({kTokens, weight.size(1)});
      const auto output = input.mm(weight.t());
      output.mm(weight);
      output.t().mm(input);
    }
  }

  double gather(Json& answer) {
    StateDict sharded, whole;
    for (const auto& [name, tensor] : state_) sharded.set(name, tensor);
    const double seconds =
        seconds_of([&] { whole = gather_state_dict(sharded, {.cpu_offload = true, .ranks_only = {0}}); });
    bool right = whole.size() == (group_.rank() == 0 ? state_.size() : 0);
    size_t at = 0;
    for (const auto& [key, value] : whole) {
      right = right && value.tensor().sizes() == state_[at++].second.sizes() && !is_dtensor(value.tensor());
      result_bytes_ += static_cast<int64_t>(value.tensor().nbytes());
    }
    answer["right"] = true_on_all_ranks(group_, right);
    return seconds;
  }

  std::unique_ptr<CheckpointWriter> make_writer(const fs::path& folder, bool async) {
    return std::make_unique<CheckpointWriter>(CheckpointOptions{
        .folder = folder, .world = world_, .keep_last = 1, .keep_best = 0, .async = async, .defer_copy = async});
  }

  std::shared_ptr<comm::World> world_;
  comm::Group& group_;
  NamedTensors state_;
  std::unique_ptr<CheckpointWriter> writer_, async_writer_;
  int64_t step_ = 0;
  int64_t result_bytes_ = 0;  // bytes of the operation's result, which is not extra memory
};

// Our ranks and the peer's ranks. Both hold the same state.
class RankSets {
 public:
  RankSets(const std::string& self, fs::path folder)
      : folder_(std::move(folder)),
        ours_({self, "--ranks", std::to_string(kRanks)}),
        peer_("checkpoint.py", {std::to_string(kRanks)}) {}

  // Also sets largest_bytes, the bytes of the largest parameter.
  void set_state(const std::string& weights) {
    const auto ours = ours_.ask({{"op", "state"}, {"weights", weights}});
    const auto peer = peer_.ask({{"op", "state"}, {"weights", weights}});
    right = ours["bytes"] == peer["bytes"];
    bytes = ours["bytes"].get<double>();
    largest_bytes = 0;
    for (const auto& [name, shape] : state_shapes(weights)) {
      largest_bytes = std::max(largest_bytes, 4.0 * static_cast<double>(c10::multiply_integers(shape)));
    }
  }
  Json ask(bool of_peer, const char* op) {
    auto answer = (of_peer ? peer_ : ours_).ask({{"op", op}, {"folder", folder_.string()}});
    right = right && answer.value("right", true);
    return answer;
  }
  double seconds(bool of_peer, const char* op) { return ask(of_peer, op)["seconds"].get<double>(); }
  double speed(bool of_peer, const char* op) { return bytes / seconds(of_peer, op) / 1e9; }
  double extra_megabytes(bool of_peer, const char* op) {
    return std::max(ask(of_peer, op)["extra_bytes"].get<double>() / 1e6, 0.1);
  }

  bool right = true;
  double bytes = 0, largest_bytes = 0;

 private:
  fs::path folder_;
  Peer ours_, peer_;
};

void compare(Harness& harness, RankSets& rank_sets, const std::string& state, const char* op, double at_least) {
  harness.run({.name = fmt::format("{} {}, {} ranks", op, state, kRanks),
               .unit = "GB/s",
               .at_least = at_least,
               .verified = [&] { return rank_sets.right; },
               .ours = [&] { return rank_sets.speed(false, op); },
               .peer = [&] { return rank_sets.speed(true, op); }});
}

// Compares the peak memory beyond the state and the operation's result. The limit is twice the size of the largest
// parameter.
void compare_memory(Harness& harness, RankSets& rank_sets, const std::string& state, const char* op) {
  harness.run({.name = fmt::format("extra memory of {} {}, {} ranks", op, state, kRanks),
               .unit = "MB",
               .at_most = 2 * rank_sets.largest_bytes / 1e6,
               .higher_is_better = false,
               .verified = [&] { return rank_sets.right; },
               .ours = [&] { return rank_sets.extra_megabytes(false, op); },
               .peer = [&] { return rank_sets.extra_megabytes(true, op); }});
}

void measure_state(Harness& harness, RankSets& rank_sets, const std::string& state, const std::string& weights) {
  rank_sets.set_state(weights);
  // A save has no limit here, because its target is the smaller of twice the peer's speed and 0.8 of a plain write.
  compare(harness, rank_sets, state, "save", 0);
  harness.run({.name = "save " + state + " vs. plain write with fsync",
               .unit = "GB/s",
               .at_least = 0.8,
               .verified = [] { return true; },
               .ours = [&] { return rank_sets.speed(false, "save"); },
               .peer = [&] { return rank_sets.speed(false, "write"); }});
  compare(harness, rank_sets, state, "load", 1);
  compare(harness, rank_sets, state, "gather", 2);
  for (const char* op : {"save", "load", "gather"}) compare_memory(harness, rank_sets, state, op);
  const auto compare_ours = [&](const std::string& name, double at_least, const char* op, const char* baseline_op) {
    harness.run({.name = name + ", " + state,
                 .unit = "ms",
                 .at_least = at_least,
                 .higher_is_better = false,
                 .verified = [] { return true; },
                 .ours = [&, op] { return 1e3 * rank_sets.seconds(false, op); },
                 .peer = [&, baseline_op] { return 1e3 * rank_sets.seconds(false, baseline_op); }});
  };
  compare_ours("stall of an asynchronous save vs. a synchronous save", 20, "stall", "save");
  compare_ours("step during an asynchronous save vs. step alone", 0, "step_during_save", "step");
}

int run(Harness& harness, const std::string& self) {
  harness.threads = kRanks;
  // The folder is on the disk of the build folder, not in memory.
  const auto folder = fs::path(source_folder()) / "build" / (".bench-" + random_hex(8));
  fs::create_directories(folder);
  const struct Cleanup {
    fs::path folder;
    ~Cleanup() { fs::remove_all(folder); }
  } cleanup{folder};
  RankSets rank_sets(self, folder);
  measure_state(harness, rank_sets, "302 MB", "");
  const auto weights = assets_folder() / "smollm2" / "model.safetensors";
  if (fs::exists(weights)) {
    measure_state(harness, rank_sets, "SmolLM2", weights);
  } else {
    fmt::print("checkpoint {} does not exist: skipping the SmolLM2 cases. Fetch it with './dev assets'.\n",
               weights.string());
  }
  return harness.exit_code();
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera::bench;
  return bench_main("checkpoint", [&] {
    if (argc == 2 && std::string(argv[1]) == "--rank") {
      at::set_num_threads(1);
      return Rank().serve();
    }
    if (argc == 3 && std::string(argv[1]) == "--ranks") {
      return tessera::comm::launch_local_ranks({argv[0], "--rank"}, {.nproc = std::stoi(argv[2])});
    }
    Harness harness("checkpoint", argc, argv);
    return run(harness, argv[0]);
  });
}
