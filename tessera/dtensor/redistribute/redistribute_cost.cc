// Cost of redistributions by PyTorch's cost model: a start-up time, a latency for each hop, and the bytes received
// divided by the bandwidth of the link.
#include <algorithm>
#include <limits>

#include "tessera/dtensor/redistribute/redistribute.h"

namespace tessera {

namespace {

struct LinkCost {
  double latency;
  double bandwidth;
};

// Returns the latency (us) and bandwidth (GB/s) of the links along a mesh dim, with the constants of PyTorch's model:
// an NVLink-like link inside a host, 0.22 of its bandwidth between hosts.
LinkCost link_cost(const DeviceMesh& mesh, int64_t mesh_dim) {
  int64_t devices = 1;
  for (int64_t i = mesh.ndim() - 1; i >= mesh_dim; --i) devices *= mesh.shape()[i];
  // A mesh dim counts as inside a host if the number of ranks of this and the later mesh dims, `devices`, is at most
  // the number of ranks on the host with the fewest ranks. All ranks know this smallest number, so all choose the same
  // plan. The number of ranks on a rank's own host may differ between ranks.
  const bool inside_host = devices <= mesh.world()->info().hosts.least_ranks;
  return inside_host ? LinkCost{0.6, 87.7} : LinkCost{2.7, 87.7 * 0.22};
}

double parts_of(const ShardSplits& splits, const DeviceMesh& mesh) {
  double parts = 1;
  for (const ShardSplit& split : splits) parts *= static_cast<double>(mesh.shape()[split.mesh_dim]);
  return parts;
}

// Cost of a step in microseconds; `tensor_gigabytes` is the size of the global tensor.
double step_cost(const RedistributeStep& step, double tensor_gigabytes, const DeviceMesh& mesh) {
  if (!communicates(step)) return 0;
  double k = 1;
  for (const int64_t dim : step.mesh_dims) k *= static_cast<double>(mesh.shape()[dim]);
  const auto [latency, bandwidth] = link_cost(mesh, step.mesh_dims.front());
  double received = 0;
  double hops = k - 1;
  double start = 6.6;
  switch (step.kind) {
    case RedistributeStep::Kind::kAllReduce:
      received = 2 * tensor_gigabytes / parts_of(step.from, mesh) * (k - 1) / k;
      hops *= 2;
      break;
    case RedistributeStep::Kind::kReduceScatter:
      received = tensor_gigabytes / parts_of(step.from, mesh) * (k - 1) / k;
      break;
    case RedistributeStep::Kind::kAllGather:
      received = tensor_gigabytes / parts_of(step.to, mesh) * (k - 1) / k;
      break;
    default: {  // all_to_all: this rank already holds 1/divisor of the part that it needs
      double divisor = 1;
      for (const ShardSplit& c : step.from) {
        const bool moves = std::ranges::find(step.mesh_dims, c.mesh_dim) != step.mesh_dims.end();
        divisor *= moves ? static_cast<double>(mesh.shape()[c.mesh_dim]) : 1;
      }
      received = tensor_gigabytes / parts_of(step.to, mesh) * (1 - 1 / divisor);
      start += 1;
    }
  }
  return start + hops * latency + received / bandwidth * 1e6;
}

}  // namespace

double cost_of(const RedistributeSteps& steps, int64_t item_bytes, const DeviceMesh& mesh) {
  double total = 0;
  for (const RedistributeStep& step : steps) {
    double tensor_gigabytes = static_cast<double>(item_bytes) / (1 << 30);
    for (const int64_t size : step.global_sizes) tensor_gigabytes *= static_cast<double>(size);
    total += step_cost(step, tensor_gigabytes, mesh);
  }
  return total;
}

double redistribute_cost(c10::IntArrayRef global_sizes, int64_t item_bytes, const DeviceMesh& mesh,
                         const Placements& from, const Placements& to) {
  if (from == to || std::ranges::all_of(from, [](const auto& p) { return p.is_replicate(); })) return 0;
  for (size_t i = 0; i < from.size(); ++i) {
    if ((from[i].is_any_shard() || from[i].is_partial()) && to[i].is_partial() && from[i] != to[i]) {
      return std::numeric_limits<double>::infinity();
    }
  }
  return cost_of(plan_greedy(global_sizes, mesh, from, to), item_bytes, mesh);
}

}  // namespace tessera
