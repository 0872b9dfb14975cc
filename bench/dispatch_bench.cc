// Compares the time that a DTensor adds to an operation with that of torch.distributed.tensor. Measured are repeated
// calls (hit) and calls with a new shape (miss), for an operation of each family, on one rank and on two. Rows are
// sharded, no operation communicates, and tensors are tiny, so that only dispatch counts. A further case is the time of
// a repeated slice of a mesh.
//
//   bench_dispatch              the harness; each half is a long-lived set of ranks that answers requests
//   bench_dispatch --rank       one of our ranks, started by `tessera launch`
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/util/irange.h>
#include <fmt/format.h>

#include <cmath>
#include <functional>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include "bench/harness.h"
#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/rendezvous/rendezvous.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera::bench {
namespace {

using Tensors = std::vector<at::Tensor>;

// An operation; peers/dispatch.py has the same list. Inputs with `whole` are replicated, the others are sharded by
// rows.
struct Row {
  std::string name;
  double hit_ratio, hit_us;  // smallest accepted ratio, largest accepted time
  std::function<Tensors(int64_t rows)> inputs;
  std::vector<bool> whole;
  std::function<at::Tensor(const Tensors&)> run;
  bool gradients = false;
};

// Returns values that the peer computes in the same way.
at::Tensor values(std::vector<int64_t> sizes) {
  const int64_t count = c10::multiply_integers(sizes);
  return at::arange(count, at::kLong).mul_(7).remainder_(16).sub_(8).to(at::kFloat).div_(4).view(sizes);
}

std::vector<Row> all_rows() {
  const auto one = [](int64_t rows) { return Tensors{values({rows, 4})}; };
  const auto two = [](int64_t rows) { return Tensors{values({rows, 4}), values({rows, 4}) + 1}; };
  const auto product = [](int64_t rows) { return Tensors{values({rows, 4}), values({4, 4}) + 1}; };
  const auto layer = [](int64_t rows) { return Tensors{values({rows, 4}), values({4}), values({4})}; };
  const auto lookup = [](int64_t rows) { return Tensors{at::arange(rows, at::kLong) % 4, values({4, 4})}; };
  const auto columns = [](int64_t rows) { return Tensors{values({rows, 4}), at::arange(2, at::kLong)}; };
  return {
      {"add", 50, 0.4, two, {false, false}, [](const Tensors& t) { return at::add(t[0], t[1]); }},
      {"relu", 50, 0.4, one, {false}, [](const Tensors& t) { return at::relu(t[0]); }},
      {"mm", 50, 0.4, product, {false, true}, [](const Tensors& t) { return at::mm(t[0], t[1]); }},
      {"view", 50, 0.6, one, {false}, [](const Tensors& t) { return t[0].view({t[0].size(0) * 4}); }},
      {"relu_ in place",
       50,
       0.6,
       one,
       {false},
       [](const Tensors& t) { return at::relu_(const_cast<at::Tensor&>(t[0])); }},
      {"transpose", 50, 0.6, one, {false}, [](const Tensors& t) { return t[0].transpose(0, 1); }},
      {"narrow", 50, 0.6, one, {false}, [](const Tensors& t) { return t[0].narrow(1, 1, 2); }},
      {"sum", 50, 0.6, one, {false}, [](const Tensors& t) { return t[0].sum(1); }},
      {"softmax", 50, 0.6, one, {false}, [](const Tensors& t) { return at::_softmax(t[0], 1, false); }},
      {"cat",
       50,
       0.6,
       two,
       {false, false},
       [](const Tensors& t) {
         return at::cat({t[0], t[1]}, 1);
       }},
      {"layer_norm",
       50,
       0.6,
       layer,
       {false, true, true},
       [](const Tensors& t) { return std::get<0>(at::native_layer_norm(t[0], {4}, t[1], t[2], 1e-5)); }},
      {"embedding", 50, 0.6, lookup, {false, true}, [](const Tensors& t) { return at::embedding(t[1], t[0]); }},
      {"index_select",
       50,
       0.6,
       columns,
       {false, true},
       [](const Tensors& t) { return at::index_select(t[0], 1, t[1]); }},
      {"_foreach_add", 50, 0.6, two, {false, false}, [](const Tensors& t) { return at::_foreach_add(t, 1.0)[1]; }},
      {"(a@b).relu().sum() and backward",
       50,
       0,
       product,
       {false, true},
       [](const Tensors& t) {
         for (const auto& tensor : t) tensor.mutable_grad() = at::Tensor();
         at::mm(t[0], t[1]).relu().sum().backward();
         return t[0].grad();
       },
       true},
  };
}

Tensors plain(const Row& row, int64_t rows) {
  Tensors all = row.inputs(rows);
  for (auto& tensor : all) tensor.requires_grad_(row.gradients && tensor.is_floating_point());
  return all;
}

Tensors spread(const Row& row, int64_t rows, const MeshPtr& mesh) {
  Tensors all = row.inputs(rows);
  for (const size_t i : c10::irange(all.size())) {
    all[i] = distribute_tensor(all[i].requires_grad_(row.gradients && all[i].is_floating_point()), mesh,
                               {row.whole[i] ? Replicate() : Shard(0)}, std::nullopt);
  }
  return all;
}

// Returns the microseconds that a DTensor adds to one call: the median difference between blocks of DTensor calls and
// of plain calls. The blocks alternate, so that both run under the same load of the machine.
double added_on_hits(const Row& row, const MeshPtr& mesh, int calls) {
  const int64_t rows = 2 * mesh->size();
  const Tensors part = spread(row, rows, mesh), whole = plain(row, rows / mesh->size());
  constexpr int kBlocks = 20;
  const auto time = [&](const Tensors& inputs) {
    return seconds_of([&] {
      for (int i = 0; i < calls / kBlocks; ++i) row.run(inputs);
    });
  };
  row.run(part);
  std::vector<double> differences;
  for (int block = 0; block < kBlocks; ++block) {
    const double with = time(part);
    differences.push_back(with - time(whole));
  }
  return summarize(differences).median * 1e6 / (calls / kBlocks);
}

// Returns the same for calls that each have a new shape: the difference of the median calls.
double added_on_misses(const Row& row, const MeshPtr& mesh, int calls, int64_t& rows) {
  std::vector<double> with, without;
  for (int i = 0; i < calls; ++i) {
    rows += mesh->size();
    const Tensors part = spread(row, rows, mesh), whole = plain(row, rows / mesh->size());
    with.push_back(seconds_of([&] { row.run(part); }));
    without.push_back(seconds_of([&] { row.run(whole); }));
  }
  return (summarize(with).median - summarize(without).median) * 1e6;
}

constexpr const char* kSlice = "slice of a mesh";

// Returns the microseconds of a call, as the median over blocks of calls.
double time_of_slices(const DeviceMesh& mesh, int calls) {
  constexpr int kBlocks = 20;
  std::vector<double> seconds;
  for (int block = 0; block < kBlocks; ++block) {
    seconds.push_back(seconds_of([&] {
      for (int i = 0; i < calls / kBlocks; ++i) mesh.slice({"rows"});
    }));
  }
  return summarize(seconds).median * 1e6 / (calls / kBlocks);
}

// Runs one of our ranks. Rank 0 reads requests on its stdin and writes answers to its stdout.
int rank_main() {
  const auto world = comm::World::connect({});
  at::set_num_threads(1);
  const auto mesh = init_device_mesh(world, "cpu", {world->size()});
  const auto wide = init_device_mesh(world, "cpu", {world->size(), 1}, {"rows", "columns"});
  const auto rows = all_rows();
  std::map<std::string, int64_t> next_rows;  // per operation, so that shapes stay small
  while (true) {
    std::string line;
    if (world->rank() == 0 && !std::getline(std::cin, line)) line = "{}";
    const Json request = Json::parse(comm::broadcast_bytes(*world->group(), line));
    if (request.empty()) return 0;
    if (request["op"] == kSlice) {
      const double us = time_of_slices(*wide, request["calls"]);
      const auto size = static_cast<double>(wide->slice({"rows"})->size());
      if (world->rank() == 0) std::cout << Json{{"us", us}, {"check", size}}.dump() << std::endl;
      continue;
    }
    const auto& row = *std::ranges::find_if(rows, [&](const Row& each) { return each.name == request["op"]; });
    at::AutoGradMode gradients(row.gradients);
    comm::barrier(*world->group());
    const int calls = request["calls"];
    const double us = request["miss"]
                          ? added_on_misses(row, mesh, calls, next_rows.try_emplace(row.name, 64).first->second)
                          : added_on_hits(row, mesh, calls);
    const at::Tensor result = full_tensor(row.run(spread(row, 2 * mesh->size(), mesh)));
    const auto weights = at::arange(1, result.numel() + 1, at::kDouble);
    const double check = result.detach().to(at::kDouble).flatten().dot(weights).item<double>();
    if (world->rank() == 0) std::cout << Json{{"us", us}, {"check", check}}.dump() << std::endl;
  }
}

void measure(Harness& harness, const std::string& self, const std::string& program, int ranks) {
  Peer ours({program, "launch", "--nproc", std::to_string(ranks), "--", self, "--rank"});
  Peer peer("dispatch.py", {std::to_string(ranks)});
  harness.threads = ranks;
  const auto compare = [&](const std::string& op, bool miss, double at_least, double at_most) {
    const std::string name = fmt::format("{} {}, {} rank{}", miss ? "miss" : "hit", op, ranks, ranks == 1 ? "" : "s");
    if (!harness.wants(name)) return;
    Json our_answer, peer_answer;
    const auto ask = [&](Peer& half, int calls, Json& answer) {
      answer = half.ask({{"op", op}, {"calls", calls}, {"miss", miss}});
      return answer["us"].get<double>();
    };
    // A miss of the peer takes milliseconds. Our time would be lost in the noise unless we measure more misses.
    harness.run(
        {.name = name,
         .unit = "us",
         .at_least = at_least,
         .at_most = at_most,
         .higher_is_better = false,
         .verified =
             [&] { return std::abs(our_answer["check"].get<double>() - peer_answer["check"].get<double>()) < 1e-3; },
         .ours = [&] { return ask(ours, miss ? 100 : 20000, our_answer); },
         .peer = [&] { return ask(peer, miss ? 20 : 20000, peer_answer); }});
  };
  for (const bool miss : {false, true}) {
    for (const auto& row : all_rows()) {
      const double missed_ratio = row.gradients ? row.hit_ratio : 100, missed_us = row.gradients ? 0 : 10;
      compare(row.name, miss, miss ? missed_ratio : row.hit_ratio, miss ? missed_us : row.hit_us);
    }
  }
  compare(kSlice, /*miss=*/false, 50, 0);
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera::bench;
  return bench_main("dispatch", [&] {
    if (argc == 2 && std::string(argv[1]) == "--rank") return rank_main();
    Harness harness("dispatch", argc, argv);
    const char* program = std::getenv("TESSERA_PROGRAM");
    for (const int ranks : {1, 2}) {
      measure(harness, argv[0], program ? program : source_folder() + "/build/tessera", ranks);
    }
    return harness.exit_code();
  });
}
