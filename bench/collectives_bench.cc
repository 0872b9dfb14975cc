// Compares collectives over shared memory between ranks of one host with PyTorch over Gloo. Measured are the time of a
// call for small messages, the bandwidth for large messages, and the bandwidth relative to the machine's memory
// bandwidth. Our ranks and the peer's ranks check their results.
//
//   bench_collectives                the harness; it starts our ranks and the peer's ranks, which answer requests until
//                                    it ends
//   bench_collectives --ranks N H    launches our N ranks, on H simulated hosts
//   bench_collectives --rank H       one of our ranks
#include <ATen/Parallel.h>

#include <cstdio>
#include <cstring>
#include <iostream>
#include <numeric>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "bench/harness.h"
#include "bench/over_ranks.h"
#include "tessera/base/error.h"
#include "tessera/comm/backends/backend_choice.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/launch/launcher.h"
#include "tessera/comm/rendezvous/rendezvous.h"

namespace tessera::bench {
namespace {

// The tensors of a call. `part` has `count` floats: the tensor of an all_reduce, or one rank's part of the other
// collectives. The values are zeros, so that repeated sums do not overflow.
struct Buffers {
  // `shared`: allocates shared memory that other ranks read in place, as FSDP does. Otherwise ordinary memory.
  Buffers(comm::Group& group, int64_t count, bool shared)
      : part(zeros(group, count, shared)), all(zeros(group, count * group.size(), shared)) {}
  at::Tensor part, all;

 private:
  static at::Tensor zeros(comm::Group& group, int64_t count, bool shared) {
    return shared ? group.backend().allocateTensor(count, at::kFloat).zero_() : at::zeros({count});
  }
};

void call(comm::Group& group, const std::string& op, const Buffers& buffers) {
  if (op == "all_reduce") return comm::all_reduce(group, buffers.part).wait();
  if (op == "all_gather") return comm::all_gather_into(group, buffers.all, buffers.part).wait();
  if (op == "reduce_scatter") return comm::reduce_scatter_into(group, buffers.part, buffers.all).wait();
  if (op != "copy") throw std::runtime_error("unknown operation " + op);
  std::memcpy(buffers.all.mutable_data_ptr(), buffers.part.const_data_ptr(), buffers.part.nbytes());
}

// Returns whether a call gives the right result, for values that differ by rank and position.
bool verify(comm::Group& group, const std::string& op, int64_t count, bool shared) {
  const int size = group.size(), rank = group.rank();
  const auto values = [&](int source, int64_t length) {
    return at::arange(length, at::kFloat).remainder(1000) + source;
  };
  const auto sum_of = [&](int64_t length) {
    at::Tensor sum = values(0, length);
    for (int source = 1; source < size; ++source) sum += values(source, length);
    return sum;
  };
  const Buffers buffers(group, count, shared);
  buffers.part.copy_(values(rank, count));
  if (op == "all_reduce") {
    call(group, op, buffers);
    return at::equal(buffers.part, sum_of(count));
  }
  if (op == "all_gather") {
    call(group, op, buffers);
    bool same = true;
    for (int source = 0; source < size; ++source) {
      same = same && at::equal(buffers.all.narrow(0, source * count, count), values(source, count));
    }
    return same;
  }
  if (op == "reduce_scatter") {
    buffers.all.copy_(values(rank, count * size));
    call(group, op, buffers);
    return at::equal(buffers.part, sum_of(count * size).narrow(0, rank * count, count));
  }
  return true;
}

// Returns the group of all ranks. With several hosts, rank r is on the simulated host r % hosts.
std::shared_ptr<comm::Group> group_of(comm::World& world, int hosts) {
  if (hosts == 1) return world.group();
  std::vector<int> ranks(world.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  const auto store =
      c10::make_intrusive<c10d::PrefixStore>("hosts", c10::intrusive_ptr<c10d::Store>::reclaim_copy(&world.store()));
  auto backend = comm::choose_backend(store, {.group = "hosts",
                                              .rank = world.rank(),
                                              .size = world.size(),
                                              .ranks = ranks,
                                              .oversubscribed = world.info().cores_per_rank < 1,
                                              .host = std::to_string(world.rank() % hosts),
                                              .timeout = std::chrono::hours(1)});
  return std::make_shared<comm::Group>("hosts", ranks, world.rank(), std::move(backend));
}

// Runs one of our ranks. Rank 0 reads requests on its stdin and writes answers to its stdout.
int rank_main(int hosts) {
  at::set_num_threads(1);
  const auto world = comm::World::connect({.timeout = std::chrono::hours(1)});
  const auto shared_group = group_of(*world, hosts);
  comm::Group& group = *shared_group;
  for (;;) {
    std::string line;
    if (world->rank() == 0 && !std::getline(std::cin, line)) line = R"({"op": ""})";
    const Json request = Json::parse(comm::broadcast_bytes(group, line));
    const std::string op = request.at("op");
    if (op.empty()) return 0;
    const int64_t count = request.at("count"), calls = request.at("calls");
    const bool shared = request.value("shared", false);
    Json answer;
    if (request.value("verify", false)) {
      answer["right"] = true_on_all_ranks(group, verify(group, op, count, shared));
    } else {
      const Buffers buffers(group, count, shared);
      for (int i = 0; i < 2; ++i) call(group, op, buffers);
      comm::barrier(group);
      const double seconds = seconds_of([&] {
        for (int64_t i = 0; i < calls; ++i) call(group, op, buffers);
      });
      answer["seconds"] = max_over_ranks(group, seconds / static_cast<double>(calls));
    }
    if (world->rank() == 0) std::cout << answer.dump() << std::endl;
  }
}

// Returns the bytes that all ranks together must at least read and write: each rank reads its input directly from the
// memory of the other ranks.
double min_bytes_moved(const std::string& op, double bytes, double ranks) {
  if (op == "all_reduce") return ranks * (bytes + bytes / ranks + 2 * bytes * (ranks - 1) / ranks);
  if (op == "all_gather") return ranks * 2 * ranks * bytes;
  return ranks * (ranks * bytes + bytes);
}

std::string size_name(int64_t bytes) {
  if (bytes >= 1 << 20) return std::to_string(bytes >> 20) + " MiB";
  if (bytes >= 1 << 10) return std::to_string(bytes >> 10) + " KiB";
  return std::to_string(bytes) + " B";
}

struct Setting {
  std::string op;
  int64_t bytes, calls, peer_calls;
  double at_least;
  bool shared = false;  // our tensors are in shared memory
};

class Comparison {
 public:
  Comparison(Harness& harness, const std::string& self, int ranks, int hosts = 1)
      : harness_(harness),
        ranks_(ranks),
        hosts_(hosts),
        ours_({self, "--ranks", std::to_string(ranks), std::to_string(hosts)}),
        peer_("collectives.py", {std::to_string(ranks)}) {
    harness.threads = ranks;
  }

  void latency(const Setting& setting) {
    const std::string name = name_of(setting);
    if (!harness_.is_selected(name)) return;
    harness_.run({.name = name,
                  .unit = "us",
                  .at_least = setting.at_least,
                  .higher_is_better = false,
                  .verified = [&] { return right(setting); },
                  .ours = [&] { return 1e6 * seconds(ours_, setting, setting.calls); },
                  .peer = [&] { return 1e6 * seconds(peer_, setting, setting.peer_calls); }});
  }

  void bandwidth(const Setting& setting) {
    const std::string name = name_of(setting);
    if (!harness_.is_selected(name)) return;
    const auto gigabytes = [&](Peer& peer, int64_t calls) {
      return static_cast<double>(setting.bytes) / seconds(peer, setting, calls) / 1e9;
    };
    const bool verified = right(setting);
    harness_.run({.name = name,
                  .unit = "GB/s",
                  .at_least = setting.at_least,
                  .verified = [&] { return verified; },
                  .ours = [&] { return gigabytes(ours_, setting.calls); },
                  .peer = [&] { return gigabytes(peer_, setting.peer_calls); }});
    // The limit is the bandwidth of memcpy when all ranks copy at the same time.
    const double min_bytes = min_bytes_moved(setting.op, static_cast<double>(setting.bytes), ranks_);
    harness_.run(
        {.name = name + " vs. memory-bandwidth limit",
         .unit = "GB/s",
         .at_least = 0.6,
         .verified = [&] { return verified; },
         .ours = [&] { return min_bytes / seconds(ours_, setting, setting.calls) / 1e9; },
         .peer = [&] { return 2.0 * ranks_ * setting.bytes / seconds(ours_, setting, "copy", setting.calls) / 1e9; }});
  }

 private:
  std::string name_of(const Setting& setting) const {
    const std::string name = fmt::format("{} {}, {} ranks", setting.op, size_name(setting.bytes), ranks_);
    if (setting.shared) return name + ", tensors in shared memory";
    return hosts_ == 1 ? name : fmt::format("{}, {} simulated hosts", name, hosts_);
  }
  static double seconds(Peer& peer, const Setting& setting, int64_t calls) {
    return seconds(peer, setting, setting.op, calls);
  }
  static double seconds(Peer& peer, const Setting& setting, const std::string& op, int64_t calls) {
    const Json request = {{"op", op}, {"count", setting.bytes / 4}, {"calls", calls}, {"shared", setting.shared}};
    return peer.ask(request)["seconds"].get<double>();
  }
  bool right(const Setting& setting) {
    const Json request = {
        {"op", setting.op}, {"count", setting.bytes / 4}, {"calls", 1}, {"verify", true}, {"shared", setting.shared}};
    return ours_.ask(request)["right"].get<bool>() && peer_.ask(request)["right"].get<bool>();
  }

  Harness& harness_;
  int ranks_, hosts_;
  Peer ours_, peer_;
};

int run(Harness& harness, const std::string& self) {
  constexpr int64_t kMiB = 1 << 20;
  {
    Comparison two(harness, self, 2);
    two.latency({"all_reduce", 4, 20'000, 500, 20});
    two.latency({"all_reduce", 4096, 20'000, 200, 40});
    for (const char* op : {"all_reduce", "all_gather", "reduce_scatter"}) {
      for (const bool shared : {false, true}) {
        two.bandwidth({op, 4 * kMiB, 40, 10, 3, shared});
        two.bandwidth({op, 64 * kMiB, 3, 1, 3, shared});
      }
    }
  }
  {
    Comparison hosts(harness, self, 4, 2);
    for (const int64_t bytes : {int64_t{4}, int64_t{64 * 1024}, 4 * kMiB}) {
      for (const char* op : {"all_reduce", "all_gather", "reduce_scatter"}) {
        hosts.latency({op, bytes, bytes < kMiB ? 200 : 5, bytes < kMiB ? 50 : 5, 1});
      }
    }
  }
  Comparison four(harness, self, 4);
  four.latency({"all_reduce", 4, 5'000, 50, 10});
  four.latency({"all_reduce", 1024, 5'000, 50, 10});
  four.latency({"all_gather", 4096, 5'000, 50, 10});
  four.latency({"reduce_scatter", 64 * 1024, 500, 20, 10});
  four.latency({"all_reduce", 4 * kMiB, 10, 5, 0});
  return harness.exit_code();
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera::bench;
  return bench_main("collectives", [&] {
    if (argc == 3 && std::string(argv[1]) == "--rank") return rank_main(std::stoi(argv[2]));
    if (argc == 4 && std::string(argv[1]) == "--ranks") {
      return tessera::comm::launch_local_ranks({argv[0], "--rank", argv[3]}, {.nproc = std::stoi(argv[2])});
    }
    Harness harness("collectives", argc, argv);
    return run(harness, argv[0]);
  });
}
