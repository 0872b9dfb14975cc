#include "tessera/optim/nemo/tp_replicas.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <unordered_map>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/nn/gradient_marks.h"
#include "tessera/optim/detail/mesh_dims.h"
#include "tessera/optim/detail/model_parameters.h"

namespace tessera::optim {
namespace {

using nn::ReplicaReduction;

struct Replica {
  std::string name;
  at::Tensor parameter;
  ReplicaReduction reduction;

  std::string description() const;  // one line of text that must be equal on all ranks
};

std::string Replica::description() const {
  const char* reduction_name = reduction == ReplicaReduction::kSum ? "sum" : "mean";
  const at::Tensor gradient = parameter.grad();
  if (!gradient.defined()) return fmt::format("{}: {}, no gradient", name, reduction_name);
  if (gradient.layout() != at::kStrided) return fmt::format("{}: {}, a sparse gradient", name, reduction_name);
  const at::Tensor part = local_tensor_of(gradient);
  return fmt::format("{}: {}, {} [{}] {}", name, reduction_name, c10::toString(part.scalar_type()),
                     fmt::join(part.sizes(), ", "), is_dtensor(gradient) ? to_string(placements(gradient)) : "plain");
}

bool replicated_over(const at::Tensor& tensor, const comm::Group& group) {
  if (!is_dtensor(tensor)) return true;
  const auto& mesh = *device_mesh(tensor);
  if (!mesh.coordinate()) return false;
  return std::ranges::all_of(detail::dims_along(mesh, group),
                             [&](int64_t dim) { return placements(tensor)[static_cast<size_t>(dim)].is_replicate(); });
}

// Module path to reduction, for modules marked in nn::GradientMarks::tp_replicas or listed in TpReplicaOptions.
using Rules = std::map<std::string, ReplicaReduction>;

Rules rules_of(nn::Module& part, const TpReplicaOptions& options) {
  Rules rules;
  const auto listed = [](const std::vector<const nn::Module*>& list, const nn::Module* module) {
    return std::ranges::find(list, module) != list.end();
  };
  for (const auto& [path, module] : part.named_modules()) {
    const auto* marks = nn::gradient_marks(*module);
    if (marks != nullptr && marks->tp_replicas) rules[path] = *marks->tp_replicas;
    if (listed(options.sum, module)) rules[path] = ReplicaReduction::kSum;
    if (listed(options.skip, module)) rules[path] = ReplicaReduction::kSkip;
  }
  return rules;
}

// Returns the reduction of the nearest module that has one in `rules`, from the parameter's own module up to the root.
// If none has one, returns the mean.
ReplicaReduction rule_for(const Rules& rules, std::string path) {
  for (;;) {
    const auto dot = path.rfind('.');
    path.resize(dot == std::string::npos ? 0 : dot);  // path of the enclosing module
    if (const auto found = rules.find(path); found != rules.end()) return found->second;
    if (path.empty()) return ReplicaReduction::kMean;
  }
}

// First finds the reduction of every parameter and checks that modules that share a parameter agree on it; then lists
// the parameters whose gradients are reduced.
std::vector<Replica> replicas_of(const std::vector<nn::Module*>& parts, const comm::Group& group,
                                 const TpReplicaOptions& options) {
  std::unordered_map<const c10::TensorImpl*, std::pair<std::string, ReplicaReduction>> reductions;
  for (auto* part : parts) {
    const Rules rules = rules_of(*part, options);
    for (const auto& named : part->named_parameters(true)) {
      const auto reduction = rule_for(rules, named.name);
      const auto [at, fresh] =
          reductions.emplace(named.slot->parameter.unsafeGetTensorImpl(), std::pair(named.name, reduction));
      TESSERA_CHECK(at->second.second == reduction, ErrorKind::kShape,
                    "[optim.tp_replicas] {} and {} are the same parameter, but their modules reduce its gradient over "
                    "tensor parallelism in two ways, wanted one. Mark both modules with the same reduction.",
                    at->second.first, named.name);
    }
  }
  std::vector<Replica> out;
  for (const auto& parameter : detail::model_parameters(parts)) {
    const auto& tensor = parameter.tensor;
    const auto reduction = reductions.at(tensor.unsafeGetTensorImpl()).second;
    if (!tensor.requires_grad() || parameter.local_expert || parameter.owner_divisor) continue;
    if (reduction == ReplicaReduction::kSkip || !replicated_over(tensor, group)) continue;
    out.push_back({parameter.name, tensor, reduction});
  }
  return out;
}

// All-gathers Replica::description() of each parameter and compares the texts of the ranks, so that every rank raises
// the same error before any reduction starts. COLLECTIVE over `group`.
void check_equal_on_ranks(comm::Group& group, const std::vector<Replica>& replicas) {
  std::string own;
  for (const auto& replica : replicas) own += replica.description() + "\n";
  const auto all = comm::all_gather_bytes(group, own);
  const auto lines = [](std::string_view text) {
    std::vector<std::string_view> out;
    for (size_t end; (end = text.find('\n')) != std::string_view::npos; text.remove_prefix(end + 1)) {
      out.push_back(text.substr(0, end));
    }
    return out;
  };
  const auto first = lines(all[0]);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    const auto other = lines(all[rank]);
    size_t at = 0;
    while (at < first.size() && at < other.size() && first[at] == other[at]) ++at;
    const auto line_at = [at](const auto& list) { return at < list.size() ? quote(list[at], 300) : "nothing more"; };
    raise(ErrorKind::kShape,
          "[optim.tp_replicas] gradients of replicas are not alike over '{}': rank {} has {}, rank {} has {}. Use the "
          "parameter on every rank, or mark its module kSkip.",
          group.name(), group.ranks()[0], line_at(first), group.ranks()[rank], line_at(other));
  }
  for (const auto& replica : replicas) {
    TESSERA_CHECK(!replica.parameter.grad().defined() || replica.parameter.grad().layout() == at::kStrided,
                  ErrorKind::kShape, "[optim.tp_replicas] {}: found a sparse gradient, wanted a dense one",
                  replica.name);
  }
}

// Gradients that one all-reduce reduces together.
struct Bucket {
  ReplicaReduction reduction;
  at::ScalarType dtype;
  c10::Device device;
  std::vector<at::Tensor> parts = {};
  int64_t bytes = 0;
};

at::ScalarType reduce_dtype(at::ScalarType dtype) {
  return dtype == at::kBFloat16 || dtype == at::kHalf ? at::kFloat : dtype;
}

// A gradient goes into the newest bucket of its reduction, dtype and device, or into a new bucket if that bucket would
// exceed bucket_bytes. The buckets depend only on properties that check_equal_on_ranks() found equal on all ranks, so
// the ranks' all-reduces match.
std::vector<Bucket> buckets_of(const std::vector<Replica>& replicas, const comm::Group& group, int64_t bucket_bytes) {
  std::vector<Bucket> out;
  for (const auto& replica : replicas) {
    const at::Tensor gradient = replica.parameter.grad();
    if (!gradient.defined() || !replicated_over(gradient, group)) continue;
    const at::Tensor part = local_tensor_of(gradient);
    if (part.numel() == 0) continue;
    const int64_t bytes = part.numel() * static_cast<int64_t>(c10::elementSize(reduce_dtype(part.scalar_type())));
    auto at = std::find_if(out.rbegin(), out.rend(), [&](const Bucket& bucket) {
      return bucket.reduction == replica.reduction && bucket.dtype == part.scalar_type() &&
             bucket.device == part.device();
    });
    if (at == out.rend() || at->bytes + bytes > bucket_bytes) {
      out.push_back({replica.reduction, part.scalar_type(), part.device()});
      at = out.rbegin();
    }
    at->parts.push_back(part);
    at->bytes += bytes;
  }
  return out;
}

// All-reduces a bucket in one flat tensor and copies the results back. COLLECTIVE over the group.
void reduce(comm::Group& group, const Bucket& bucket) {
  std::vector<at::Tensor> flat;
  for (const auto& part : bucket.parts) flat.push_back(part.flatten().to(reduce_dtype(part.scalar_type())));
  at::Tensor sum = at::cat(flat);
  flat.clear();
  comm::all_reduce(group, sum, comm::ReduceOp::kSum, "gradients of replicas").wait();
  if (bucket.reduction == ReplicaReduction::kMean) sum.div_(static_cast<double>(group.size()));
  int64_t begin = 0;
  for (const auto& part : bucket.parts) {
    part.copy_(sum.narrow(0, begin, part.numel()).view(part.sizes()));
    begin += part.numel();
  }
}

}  // namespace

void synchronize_tp_replica_gradients(const std::vector<nn::Module*>& model_parts, const MeshPtr& device_mesh,
                                      const TpReplicaOptions& options) {
  TESSERA_CHECK(options.bucket_bytes >= 1, ErrorKind::kConfig,
                "[optim.tp_replicas] bucket_bytes: found {}, wanted at least 1", options.bucket_bytes);
  if (!device_mesh || !device_mesh->has_dim(options.tp_axis_name)) return;
  const int64_t dim = device_mesh->dim_of(options.tp_axis_name);
  if (device_mesh->size(dim) == 1 || !device_mesh->coordinate()) return;
  auto& group = *device_mesh->group(dim);
  const c10::NoGradGuard no_grad;
  // check_equal_on_ranks() compares the replicas of all ranks before any gradient changes, so that an error leaves all
  // gradients as they were.
  const auto replicas = replicas_of(model_parts, group, options);
  check_equal_on_ranks(group, replicas);
  for (const auto& bucket : buckets_of(replicas, group, options.bucket_bytes)) reduce(group, bucket);
}

}  // namespace tessera::optim
