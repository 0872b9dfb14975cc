// Compares the time that a DTensor adds to an operation with that of torch.distributed.tensor. Measured are calls with
// cached dispatch (cache hit: the same shapes as before) and calls with new shapes (cache miss), for several kinds of
// operations, on one rank and on two. Rows are sharded, no operation communicates, and tensors are tiny, so that the
// time is that of dispatch. A further case is the time of a repeated slice of a DeviceMesh.
//
//   bench_dispatch              the harness; it starts our ranks and the peer's ranks, which answer requests until it
//                               ends
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

// An operation. peers/dispatch.py has the same list. Inputs with `replicated` are replicated, the others are sharded by
// rows.
struct Operation {
  std::string name;
  double hit_ratio, hit_us;  // smallest accepted ratio and largest accepted time of a cache hit
  std::function<Tensors(int64_t rows)> inputs;
  std::vector<bool> replicated;
  std::function<at::Tensor(const Tensors&)> run;
  bool gradients = false;
};

// Returns values that the peer computes in the same way.
at::Tensor values(std::vector<int64_t> sizes) {
  const int64_t count = c10::multiply_integers(sizes);
  return at::arange(count, at::kLong).mul_(7).remainder_(16).sub_(8).to(at::kFloat).div_(4).view(sizes);
}

std::vector<Operation> all_operations() {
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

Tensors plain_inputs(const Operation& operation, int64_t rows) {
  Tensors all = operation.inputs(rows);
  for (auto& tensor : all) tensor.requires_grad_(operation.gradients && tensor.is_floating_point());
  return all;
}

Tensors dtensor_inputs(const Operation& operation, int64_t rows, const MeshPtr& mesh) {
  Tensors all = operation.inputs(rows);
  for (const size_t i : c10::irange(all.size())) {
    all[i] = distribute_tensor(all[i].requires_grad_(operation.gradients && all[i].is_floating_point()), mesh,
                               {operation.replicated[i] ? Replicate() : Shard(0)}, std::nullopt);
  }
  return all;
}

// Returns the microseconds that a DTensor adds to one call: the median difference between blocks of DTensor calls and
// of plain calls. The blocks alternate, so that both run under the same load of the machine.
double hit_overhead(const Operation& operation, const MeshPtr& mesh, int calls) {
  const int64_t rows = 2 * mesh->size();
  const Tensors sharded = dtensor_inputs(operation, rows, mesh), plain = plain_inputs(operation, rows / mesh->size());
  constexpr int kBlocks = 20;
  const auto time = [&](const Tensors& inputs) {
    return seconds_of([&] {
      for (int i = 0; i < calls / kBlocks; ++i) operation.run(inputs);
    });
  };
  operation.run(sharded);
  std::vector<double> differences;
  for (int block = 0; block < kBlocks; ++block) {
    const double with = time(sharded);
    differences.push_back(with - time(plain));
  }
  return summarize(differences).median * 1e6 / (calls / kBlocks);
}

// Returns the microseconds that a DTensor adds to one call with a new shape: the difference of the medians of DTensor
// calls and of plain calls.
double miss_overhead(const Operation& operation, const MeshPtr& mesh, int calls, int64_t& rows) {
  std::vector<double> with, without;
  for (int i = 0; i < calls; ++i) {
    rows += mesh->size();
    const Tensors sharded = dtensor_inputs(operation, rows, mesh), plain = plain_inputs(operation, rows / mesh->size());
    with.push_back(seconds_of([&] { operation.run(sharded); }));
    without.push_back(seconds_of([&] { operation.run(plain); }));
  }
  return (summarize(with).median - summarize(without).median) * 1e6;
}

constexpr const char* kSlice = "DeviceMesh slice";

// Returns the microseconds of a call, as the median over blocks of calls.
double slice_time(const DeviceMesh& mesh, int calls) {
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
  const auto mesh_2d = init_device_mesh(world, "cpu", {world->size(), 1}, {"rows", "columns"});
  const auto operations = all_operations();
  std::map<std::string, int64_t> next_rows;  // next new number of rows, per operation, so that shapes stay small
  while (true) {
    std::string line;
    if (world->rank() == 0 && !std::getline(std::cin, line)) line = "{}";
    const Json request = Json::parse(comm::broadcast_bytes(*world->group(), line));
    if (request.empty()) return 0;
    if (request["op"] == kSlice) {
      const double us = slice_time(*mesh_2d, request["calls"]);
      const auto size = static_cast<double>(mesh_2d->slice({"rows"})->size());
      if (world->rank() == 0) std::cout << Json{{"us", us}, {"check", size}}.dump() << std::endl;
      continue;
    }
    const auto& operation =
        *std::ranges::find_if(operations, [&](const Operation& each) { return each.name == request["op"]; });
    at::AutoGradMode gradients(operation.gradients);
    comm::barrier(*world->group());
    const int calls = request["calls"];
    const double us =
        request["miss"] ? miss_overhead(operation, mesh, calls, next_rows.try_emplace(operation.name, 64).first->second)
                        : hit_overhead(operation, mesh, calls);
    const at::Tensor result = full_tensor(operation.run(dtensor_inputs(operation, 2 * mesh->size(), mesh)));
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
    const std::string name =
        fmt::format("cache {}: {}, {} rank{}", miss ? "miss" : "hit", op, ranks, ranks == 1 ? "" : "s");
    if (!harness.is_selected(name)) return;
    Json our_answer, peer_answer;
    const auto ask = [&](Peer& rank_set, int calls, Json& answer) {
      answer = rank_set.ask({{"op", op}, {"calls", calls}, {"miss", miss}});
      return answer["us"].get<double>();
    };
    // A cache miss of the peer takes milliseconds, and ours microseconds, so ours needs more calls for a precise time.
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
    for (const auto& operation : all_operations()) {
      const double miss_ratio = operation.gradients ? operation.hit_ratio : 100, miss_us = operation.gradients ? 0 : 10;
      compare(operation.name, miss, miss ? miss_ratio : operation.hit_ratio, miss ? miss_us : operation.hit_us);
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
