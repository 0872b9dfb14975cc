// Saves, loads and gathers sharded state of 2 ranks, and compares with torch.distributed.checkpoint in the same run.
// The figures are GB/s of the state's bytes, the extra memory, and the time that an asynchronous save delays training.
// Both halves (ours and the peer's ranks) sync the files to the disk. The states are 302 MB of moments, and
// SmolLM2-135M with both moments of AdamW (1.6 GB).
//
//   bench_checkpoint               the harness; each half is a long-lived set of ranks
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

// Returns the names and shapes of the moments, or, with a file of weights, of these weights and both moments of AdamW.
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

bool holds_its_numbers(const NamedTensors& state) {
  for (size_t i = 0; i < state.size(); ++i) {
    if (!to_local(state[i].second).eq(static_cast<float>(i + 1)).all().item<bool>()) return false;
  }
  return true;
}

// Returns the resident memory of the process without mapped files.
int64_t held_bytes() {
  std::ifstream status("/proc/self/status");
  int64_t kib = 0;
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("RssAnon:") || line.starts_with("RssShmem:")) {
      kib += std::stoll(line.substr(line.find(':') + 1));
    }
  }
  return kib * 1024;
}

// Measures the largest increase of held_bytes() since the construction. It reads the value every 2 ms.
class MemoryWatch {
 public:
  MemoryWatch() : before_(held_bytes()), thread_([this] { watch(); }) {}
  int64_t stop() {
    over_ = true;
    thread_.join();
    return most_ - before_;
  }

 private:
  void watch() {
    while (!over_) {
      most_ = std::max(most_, held_bytes());
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    most_ = std::max(most_, held_bytes());
  }
  int64_t before_, most_ = 0;
  std::atomic<bool> over_{false};
  std::thread thread_;
};

double largest(comm::Group& group, double own) {
  at::Tensor most = at::full({1}, own, at::kDouble);
  comm::all_reduce(group, most, comm::ReduceOp::kMax).wait();
  return most.item<double>();
}

// Writes the bytes of the state to one synced file per rank.
void write_plainly(const fs::path& folder, int rank, const NamedTensors& state) {
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
        kept_bytes_ = 0;
        MemoryWatch memory;
        const double own = measure(op, request.at("folder").get<std::string>(), answer);
        answer["extra_bytes"] = largest(group_, static_cast<double>(memory.stop() - kept_bytes_));
        answer["seconds"] = largest(group_, own);
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
    if (op == "write") return seconds_of([&] { write_plainly(folder, group_.rank(), state_); });
    if (op == "save") {
      if (!writer_) writer_ = make_writer(folder / "ours", false);
      return seconds_of([&] { writer_->save(++step_, state_, {}); });
    }
    if (op == "step") return seconds_of([&] { forward_and_backward(); });
    if (op == "stall" || op == "step beside a save") {
      // The time from the end of one optimizer step to the start of the next. The stall is the part of it that the save
      // adds to training. finish() is not measured.
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
      answer["right"] = everywhere(holds_its_numbers(state_));
      return seconds;
    }
    if (op == "gather") return gather(answer);
    throw std::runtime_error("unknown operation " + op);
  }

  // Computes the products of a step of kTokens tokens, with the state's matrices as weights.
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
      kept_bytes_ += static_cast<int64_t>(value.tensor().nbytes());
    }
    answer["right"] = everywhere(right);
    return seconds;
  }

  bool everywhere(bool here) {
    at::Tensor all = at::full({1}, here ? 1.0 : 0.0);
    comm::all_reduce(group_, all, comm::ReduceOp::kMin).wait();
    return all.item<double>() == 1;
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
  int64_t kept_bytes_ = 0;  // bytes of the measured operations' results, which do not count as extra memory
};

// Our ranks and the peer's ranks, with their last answers.
class Halves {
 public:
  Halves(const std::string& self, fs::path folder)
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

void compare(Harness& harness, Halves& halves, const std::string& state, const char* op, double at_least) {
  harness.run({.name = fmt::format("{} {} x {}", op, state, kRanks),
               .unit = "GB/s",
               .at_least = at_least,
               .verified = [&] { return halves.right; },
               .ours = [&] { return halves.speed(false, op); },
               .peer = [&] { return halves.speed(true, op); }});
}

// Compares the memory beyond the operation's result. The limit is the size of two parameters per rank.
void compare_memory(Harness& harness, Halves& halves, const std::string& state, const char* op) {
  harness.run({.name = fmt::format("extra memory of {} {} x {}", op, state, kRanks),
               .unit = "MB",
               .at_most = 2 * halves.largest_bytes / 1e6,
               .higher_is_better = false,
               .verified = [&] { return halves.right; },
               .ours = [&] { return halves.extra_megabytes(false, op); },
               .peer = [&] { return halves.extra_megabytes(true, op); }});
}

void measure_state(Harness& harness, Halves& halves, const std::string& state, const std::string& weights) {
  halves.set_state(weights);
  // The target of a save is twice the peer's speed, or 0.8 of a plain write if that is less. So it has no limit here.
  compare(harness, halves, state, "save", 0);
  harness.run({.name = "save " + state + " beside a plain synced write",
               .unit = "GB/s",
               .at_least = 0.8,
               .verified = [] { return true; },
               .ours = [&] { return halves.speed(false, "save"); },
               .peer = [&] { return halves.speed(false, "write"); }});
  compare(harness, halves, state, "load", 1);
  compare(harness, halves, state, "gather", 2);
  for (const char* op : {"save", "load", "gather"}) compare_memory(harness, halves, state, op);
  const auto beside = [&](const std::string& name, double at_least, const char* op, const char* peer_op) {
    harness.run({.name = name + ", " + state,
                 .unit = "ms",
                 .at_least = at_least,
                 .higher_is_better = false,
                 .verified = [] { return true; },
                 .ours = [&, op] { return 1e3 * halves.seconds(false, op); },
                 .peer = [&, peer_op] { return 1e3 * halves.seconds(false, peer_op); }});
  };
  beside("stall of an asynchronous save beside a synchronous one", 20, "stall", "save");
  beside("a step with an asynchronous save beside one without", 0, "step beside a save", "step");
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
  Halves halves(self, folder);
  measure_state(harness, halves, "302 MB", "");
  const auto weights = assets_folder() / "smollm2" / "model.safetensors";
  if (fs::exists(weights)) {
    measure_state(harness, halves, "SmolLM2", weights);
  } else {
    fmt::print("checkpoint {} is not there: no case SmolLM2. Fetch it with './dev assets'.\n", weights.string());
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
