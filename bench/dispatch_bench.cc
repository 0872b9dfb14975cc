// Time that a DTensor adds to an operation, beside torch.distributed.tensor: a call seen before (hit), and a shape met for the
// first time (miss). One rank, so nothing communicates; 4x4 tensors, so that only dispatch counts.
#include <ATen/Parallel.h>
#include <ATen/ATen.h>

#include <functional>
#include <string>
#include <vector>

#include "bench/harness.h"
#include "tessera/comm/world.h"
#include "tessera/dtensor/dtensor.h"

namespace tessera::bench {
namespace {

constexpr int kCalls = 20000;
constexpr int kMissCalls = 200;  // a miss of the peer takes milliseconds

using Op = std::function<at::Tensor(at::Tensor&, at::Tensor&)>;

double microseconds_a_call(const Op& op, at::Tensor& a, at::Tensor& b, int calls) {
  return seconds_of([&] {
           for (int i = 0; i < calls; ++i) {
             op(a, b);
           }
         }) * 1e6 / calls;
}

// Added by the DTensor; blocks of plain and DTensor calls alternate so that both see the same machine.
double added(const Op& op, at::Tensor& a, at::Tensor& b, at::Tensor& plain_a, at::Tensor& plain_b) {
  constexpr int kBlocks = 20;
  double difference = 0;
  for (int block = 0; block < kBlocks; ++block) {
    difference += microseconds_a_call(op, a, b, kCalls / kBlocks) - microseconds_a_call(op, plain_a, plain_b, kCalls / kBlocks);
  }
  return difference / kBlocks;
}

void compare_hits(Harness& harness, const MeshPtr& mesh) {
  struct Row {
    const char* name;
    double at_least;
    double at_most;  // us
    Op op;
  };
  const std::vector<Row> rows = {
      {"add", 12, 0.4, [](at::Tensor& a, at::Tensor& b) { return at::add(a, b); }},
      {"mm", 12, 0.4, [](at::Tensor& a, at::Tensor& b) { return at::mm(a, b); }},
      {"relu", 12, 0.4, [](at::Tensor& a, at::Tensor&) { return at::relu(a); }},
      {"view", 20, 0.6, [](at::Tensor& a, at::Tensor&) { return a.view({16}); }},
      {"add_", 20, 0.6, [](at::Tensor& a, at::Tensor& b) { return a.add_(b); }},
  };
  Peer peer("dispatch.py", {});
  for (const auto& row : rows) {
    const bool product = std::string(row.name) == "mm";
    at::Tensor plain_a = at::arange(-8, 8, at::kFloat).view({4, 4});
    at::Tensor plain_b = at::arange(16, at::kFloat).view({4, 4});
    at::Tensor a = distribute_tensor(plain_a.clone(), mesh, {Shard(0)}, std::nullopt);
    at::Tensor b = distribute_tensor(plain_b.clone(), mesh, {product ? Replicate() : Shard(0)}, std::nullopt);
    const bool same = at::equal(full_tensor(row.op(a, b)), row.op(plain_a, plain_b));
    const auto ask = [&](bool plain) {
      return peer.ask({{"op", row.name}, {"calls", kCalls}, {"plain", plain}})["seconds"].get<double>() * 1e6 / kCalls;
    };
    harness.run({.name = std::string("hit ") + row.name, .unit = "us", .at_least = row.at_least, .at_most = row.at_most,
                 .higher_is_better = false,
                 .verified = [&] { return same; },
                 .ours = [&] { return added(row.op, a, b, plain_a, plain_b); },
                 .peer = [&] { return ask(false) - ask(true); }});
  }
}

// relu of kMissCalls tensors of which none has a shape seen before.
void compare_misses(Harness& harness, const MeshPtr& mesh) {
  Peer peer("dispatch.py", {});
  int64_t rows = 4;
  bool same = false;
  const auto ours = [&] {
    std::vector<at::Tensor> whole;
    std::vector<at::Tensor> parts;
    for (int i = 0; i < kMissCalls; ++i) {
      whole.push_back(at::randn({++rows, 4}));
      parts.push_back(distribute_tensor(whole.back(), mesh, {Shard(0)}, std::nullopt));
    }
    const auto run = [](const std::vector<at::Tensor>& tensors) {
      return seconds_of([&] {
        for (const auto& tensor : tensors) {
          at::relu(tensor);
        }
      });
    };
    const double seconds = run(parts) - run(whole);
    same = at::equal(full_tensor(at::relu(parts.back())), at::relu(whole.back()));
    return seconds * 1e6 / kMissCalls;
  };
  const auto ask = [&](bool plain) {
    return peer.ask({{"op", "relu"}, {"calls", kMissCalls}, {"plain", plain}, {"miss", true}})["seconds"].get<double>() * 1e6 /
           kMissCalls;
  };
  harness.run({.name = "miss relu", .unit = "us", .at_least = 100, .at_most = 10, .higher_is_better = false, 
               .verified = [&] { return same; }, .ours = ours, .peer = [&] { return ask(false) - ask(true); }});
}

int run(int argc, char** argv) {
  Harness harness("dispatch", argc, argv);
  at::set_num_threads(1);
  at::NoGradGuard no_grad;
  const auto mesh = init_device_mesh(comm::World::single(), "cpu", {1});
  compare_hits(harness, mesh);
  compare_misses(harness, mesh);
  return harness.exit_code();
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) { return tessera::bench::run(argc, argv); }
