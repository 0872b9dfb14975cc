// Saving, loading and gathering sharded state of 2 ranks, beside torch.distributed.checkpoint in the same run: GB/s of
// the state's bytes, which both halves sync to the disk, and how long an asynchronous save holds training up.
//
//   bench_checkpoint               the harness; each half is a long-lived set of ranks
//   bench_checkpoint --ranks N     launches our N ranks
//   bench_checkpoint --rank        one of them
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <iostream>

#include "bench/harness.h"
#include "tessera/base/error.h"
#include "tessera/base/staged.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/launch/launcher.h"
#include "tessera/comm/rendezvous/rendezvous.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/state/gather_state_dict.h"

namespace tessera::bench {
namespace {

namespace fs = std::filesystem;

constexpr int kRanks = 2;
constexpr int64_t kTensors = 72, kRows = 1024, kColumns = 1024;  // 302 MB: two states of 38 M parameters
constexpr double kBytes = 4.0 * kTensors * kRows * kColumns;

NamedTensors make_state(const MeshPtr& mesh) {
  NamedTensors state;
  for (int64_t i = 0; i < kTensors; ++i) {
    const auto whole = at::full({kRows, kColumns}, static_cast<float>(i + 1));
    state.emplace_back(fmt::format("optim.state.w{}.exp_avg", i),
                       distribute_tensor(whole, mesh, {Shard(0)}, std::nullopt));
  }
  return state;
}

bool holds_its_numbers(const NamedTensors& state) {
  for (int64_t i = 0; i < kTensors; ++i) {
    if (!to_local(state[static_cast<size_t>(i)].second).eq(static_cast<float>(i + 1)).all().item<bool>()) return false;
  }
  return true;
}

double slowest(comm::Group& group, double own) {
  at::Tensor seconds = at::full({1}, own, at::kDouble);
  comm::all_reduce(group, seconds, comm::ReduceOp::kMax).wait();
  return seconds.item<double>();
}

// As many bytes in one synced file a rank, from memory.
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
  Rank() : world_(comm::World::connect({.timeout = std::chrono::hours(1)})), group_(*world_->group()) {
    state_ = make_state(init_device_mesh(world_, "cpu", {world_->size()}));
  }

  int serve() {
    for (;;) {
      std::string line;
      if (group_.rank() == 0 && !std::getline(std::cin, line)) line = R"({"op": ""})";
      const Json request = Json::parse(comm::broadcast_bytes(group_, line));
      const std::string op = request.at("op");
      if (op.empty()) return 0;
      Json answer;
      const double own = measure(op, request.at("folder").get<std::string>(), answer);
      answer["seconds"] = slowest(group_, own);
      if (group_.rank() == 0) std::cout << answer.dump() << std::endl;
      comm::barrier(group_);
    }
  }

 private:
  double measure(const std::string& op, const fs::path& folder, Json& answer) {
    comm::barrier(group_);
    if (op == "write") return seconds_of([&] { write_plainly(folder, group_.rank(), state_); });
    if (op == "save") {
      if (!writer_) writer_ = make_writer(folder / "ours", false);
      return seconds_of([&] { writer_->save(++step_, state_, {}); });
    }
    if (op == "stall") {  // until training may go on; the rest is waited for outside
      if (!async_writer_) async_writer_ = make_writer(folder / "async", true);
      const double stall = seconds_of([&] { async_writer_->save(++step_, state_, {}); });
      async_writer_->finish();
      return stall;
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

  double gather(Json& answer) {
    StateDict sharded, whole;
    for (const auto& [name, tensor] : state_) sharded.set(name, tensor);
    const double seconds =
        seconds_of([&] { whole = gather_state_dict(sharded, {.cpu_offload = true, .ranks_only = {0}}); });
    bool right = group_.rank() == 0 ? whole.size() == static_cast<size_t>(kTensors) : whole.empty();
    for (const auto& [key, value] : whole) {
      right = right && value.tensor().size(0) == kRows && !is_dtensor(value.tensor());
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
    return std::make_unique<CheckpointWriter>(
        CheckpointOptions{.folder = folder, .world = world_, .keep_last = 1, .keep_best = 0, .async = async});
  }

  std::shared_ptr<comm::World> world_;
  comm::Group& group_;
  NamedTensors state_;
  std::unique_ptr<CheckpointWriter> writer_, async_writer_;
  int64_t step_ = 0;
};

int run(Harness& harness, const std::string& self) {
  harness.threads = kRanks;
  // On the disk of the build folder, not in memory.
  const auto folder = fs::path(source_folder()) / "build" / (".bench-" + random_name());
  fs::create_directories(folder);
  const struct Cleanup {
    fs::path folder;
    ~Cleanup() { fs::remove_all(folder); }
  } cleanup{folder};
  Peer ours({self, "--ranks", std::to_string(kRanks)});
  Peer peer("checkpoint.py", {std::to_string(kRanks)});
  bool right = true;
  const auto ask = [&](Peer& half, const char* op) {
    const auto answer = half.ask({{"op", op}, {"folder", folder.string()}});
    right = right && answer.value("right", true);
    return answer["seconds"].get<double>();
  };
  const auto speed = [&](Peer& half, const char* op) { return kBytes / ask(half, op) / 1e9; };
  const auto compare = [&](const char* op, double at_least) {
    right = true;
    harness.run({.name = fmt::format("{} 302 MB x {}", op, kRanks),
                 .unit = "GB/s",
                 .at_least = at_least,
                 .verified = [&] { return right; },
                 .ours = [&] { return speed(ours, op); },
                 .peer = [&] { return speed(peer, op); }});
  };
  compare("save", 0);  // wanted is the lesser of twice this and 0.8 of what the disk takes, the next case
  harness.run({.name = "save beside a plain synced write",
               .unit = "GB/s",
               .at_least = 0.8,
               .verified = [] { return true; },
               .ours = [&] { return speed(ours, "save"); },
               .peer = [&] { return speed(ours, "write"); }});
  compare("load", 1);
  compare("gather", 2);
  harness.run({.name = "stall of an asynchronous save beside a synchronous one",
               .unit = "ms",
               .at_least = 20,
               .higher_is_better = false,
               .verified = [] { return true; },
               .ours = [&] { return 1e3 * ask(ours, "stall"); },
               .peer = [&] { return 1e3 * ask(ours, "save"); }});
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
