// from_local, to_local, redistribute, full_tensor and distribute_tensor, which tensor/dtensor.h declares.
#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <set>
#include <sstream>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/redistribute/autograd.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/dtensor/tensor/dtensor_impl.h"

namespace tessera {

namespace {

// Computes the global sizes and strides from a local tensor whose dims are sharded evenly. For each mesh dim that
// shards a tensor dim, the size of this tensor dim is multiplied by the size of the mesh dim. The strides of all dims
// that are outside of this dim in memory (larger strides) are multiplied by the same factor.
void infer_global(const at::Tensor& local, const DeviceMesh& mesh, const Placements& placements, Sizes& sizes,
                  Sizes& strides) {
  sizes.assign(local.sizes().begin(), local.sizes().end());
  strides =
      local.is_contiguous() ? dense_strides(local.sizes()) : Sizes(local.strides().begin(), local.strides().end());
  for (size_t i = 0; i < placements.size(); ++i) {
    if (!placements[i].is_any_shard()) continue;
    const size_t dim = placements[i].dim;
    const int64_t stride = strides[dim];
    for (size_t other = 0; other < sizes.size(); ++other) {
      if (other != dim && strides[other] >= stride && !(strides[other] == stride && other > dim)) {
        strides[other] *= mesh.shape()[i];
      }
    }
    sizes[dim] *= mesh.shape()[i];
  }
}

// Returns the set of the texts of all ranks of the mesh, by one all-gather for each mesh dim. After the all-gather on
// mesh dim i a rank has the texts of all ranks whose coordinates differ from its own only on mesh dims 0 ... i.
std::set<std::string> gather_from_mesh(const std::string& own, const DeviceMesh& mesh) {
  std::set<std::string> all = {own};
  for (int64_t dim = 0; dim < mesh.ndim(); ++dim) {
    const std::string known = fmt::format("{}", fmt::join(all, "\n"));
    for (const auto& others : comm::all_gather_bytes(*mesh.group(dim), known)) {
      for (size_t begin = 0; begin <= others.size();) {
        const size_t end = std::min(others.find('\n', begin), others.size());
        all.insert(others.substr(begin, end - begin));
        begin = end + 1;
      }
    }
  }
  return all;
}

// Raises Error kShape on all ranks if the metadata of `local` differ between ranks, or if any rank passes a `problem`
// (an error message; empty: none). All ranks gather first and then raise, so no rank waits in a collective for a rank
// that has raised. COLLECTIVE over the mesh.
void check_same_everywhere(const at::Tensor& local, const DeviceMesh& mesh, bool compare_shape,
                           const std::string& problem) {
  std::ostringstream text;
  if (!problem.empty()) {
    text << "rank " << mesh.rank() << ": " << problem;
  } else {
    if (compare_shape) text << "shape " << local.sizes() << ", stride " << local.strides() << ", ";
    text << "dtype " << local.dtype() << ", requires_grad " << local.requires_grad();
  }
  const auto all = gather_from_mesh(text.str(), mesh);
  TESSERA_CHECK(
      problem.empty() && all.size() == 1, ErrorKind::kShape,
      "[dtensor.from_local] Inconsistent tensor metadata (including shape and stride) across ranks. Rank {} of {} has "
      "{}; the metadata of all ranks are: {}. Use local tensors with equal metadata, or pass shape and stride.",
      mesh.rank(), mesh.to_string(), text.str(), fmt::join(all, " | "));
}

}  // namespace

FromLocalOptions FromLocalOptions::contiguous(std::vector<int64_t> shape) {
  const Sizes strides = dense_strides(shape);
  return {.shape = std::move(shape), .stride = std::vector<int64_t>(strides.begin(), strides.end())};
}

// With run_check an error of the local shape is not raised at once but passed as `problem` to check_same_everywhere(),
// so that all ranks raise. The broadcast along Replicate mesh dims writes to the caller's tensor, as in PyTorch.
at::Tensor from_local(const at::Tensor& local, const MeshPtr& mesh, const Placements& placements,
                      const FromLocalOptions& options) {
  TESSERA_CHECK(local.defined() && !is_dtensor(local), ErrorKind::kShape,
                "[dtensor.from_local] found {}, wanted a plain tensor.",
                local.defined() ? "a DTensor" : "an undefined tensor");
  TESSERA_CHECK(
      options.shape.has_value() == options.stride.has_value(), ErrorKind::kShape,
      "[dtensor.from_local] found only one of shape and stride. Please pass both shape and stride at the same time.");
  Placements checked = placements;
  check_placements("from_local", *mesh, checked,
                   options.shape ? static_cast<int64_t>(options.shape->size()) : local.dim());
  const at::Tensor here = local.device() == mesh->device() || local.is_meta() ? local : local.to(mesh->device());
  Sizes sizes;
  Sizes strides;
  std::string problem;
  if (options.shape) {
    sizes.assign(options.shape->begin(), options.shape->end());
    strides.assign(options.stride->begin(), options.stride->end());
    TESSERA_CHECK(
        sizes.size() == strides.size(), ErrorKind::kShape,
        "[dtensor.from_local] shape and stride: found {} sizes and {} strides, wanted one stride for each size.",
        sizes.size(), strides.size());
    const Sizes wanted = local_sizes(sizes, *mesh, checked);
    if (mesh->coordinate() && c10::IntArrayRef(wanted) != here.sizes()) {
      problem = fmt::format("local tensor: found shape [{}], wanted [{}] for global shape [{}] and {} on rank {}",
                            fmt::join(here.sizes(), ", "), fmt::join(wanted, ", "), fmt::join(sizes, ", "),
                            to_string(checked), mesh->rank());
      TESSERA_CHECK(options.run_check, ErrorKind::kShape,
                    "[dtensor.from_local] {}. Check the global shape, the placements and the local tensor.", problem);
    }
  } else {
    infer_global(here, *mesh, checked, sizes, strides);
  }
  if (options.run_check && mesh->coordinate()) {
    check_same_everywhere(here, *mesh, !options.shape, problem);
    at::NoGradGuard no_grad;
    for (size_t i = 0; i < checked.size(); ++i) {
      if (checked[i].is_replicate()) {
        at::Tensor values = here.detach().contiguous();
        comm::broadcast(*mesh->group(static_cast<int64_t>(i)), values, 0, "from_local").wait();
        if (!values.is_alias_of(here)) here.detach().copy_(values);
      }
    }
  }
  Placements back = options.grad_placements.value_or(partial_to_replicated(checked));
  if (options.grad_placements) check_placements("from_local", *mesh, back, static_cast<int64_t>(sizes.size()));
  return from_local_with_gradient(here, mesh, checked, sizes, strides, back);
}

at::Tensor to_local(const at::Tensor& tensor, const std::optional<Placements>& grad_placements) {
  const DTensorImpl& impl = checked_impl("to_local", tensor);
  if (!at::GradMode::is_enabled() || !tensor.requires_grad()) return impl.local();
  Placements back = grad_placements.value_or(partial_to_replicated(impl.placements()));
  if (grad_placements) check_placements("to_local", *impl.mesh(), back, tensor.dim());
  return to_local_with_gradient(tensor, back);
}

at::Tensor redistribute(const at::Tensor& tensor, const Placements& placements, const RedistributeOptions& options) {
  const DTensorImpl& impl = checked_impl("redistribute", tensor);
  Placements to = placements;
  check_placements("redistribute", *impl.mesh(), to, tensor.dim());
  for (size_t i = 0; i < to.size(); ++i) {
    TESSERA_CHECK(
        !to[i].is_partial() || to[i] == impl.placements()[i], ErrorKind::kShape,
        "[dtensor.redistribute] Can not redistribute from {} to {}, redistributing to Partial is for internal use "
        "only! Found placements {}, wanted {}.",
        to_string(impl.placements()[i]), to_string(to[i]), to_string(impl.placements()), to_string(to));
  }
  const bool same = to == impl.placements() &&
                    options.forward_dtype.value_or(tensor.scalar_type()) == tensor.scalar_type() &&
                    !options.backward_dtype;
  return same ? tensor : redistribute_with_gradient(tensor, to, options);
}

at::Tensor full_tensor(const at::Tensor& tensor, const std::optional<Placements>& grad_placements) {
  const DTensorImpl& impl = checked_impl("full_tensor", tensor);
  return to_local(redistribute(tensor, Placements(impl.placements().size(), Replicate())), grad_placements);
}

namespace {

// Scatters the shards of the root's tensor along one mesh dim. Every shard is padded to the size of the first, because
// scatter needs equal shapes. Each rank removes the padding from the shard that it receives.
at::Tensor scatter_shards(const at::Tensor& tensor, comm::Group& group, const Placement& placement, int root) {
  const int64_t n = tensor.size(placement.dim);
  const int64_t k = group.size();
  const int64_t padded_size = local_shard_size(n, k, 0, placement.split_factor);
  Sizes sizes(tensor.sizes().begin(), tensor.sizes().end());
  sizes[placement.dim] = padded_size;
  std::vector<at::Tensor> parts;
  if (group.rank() == root) {
    ShardIndices held;
    for (const int64_t size : tensor.sizes()) held.push_back(size > 0 ? IndexSpans{{0, size}} : IndexSpans{});
    for (int64_t i = 0; i < k; ++i) {
      ShardIndices needed = held;
      needed[placement.dim] = shard_index_spans(held[placement.dim], k, i, placement.split_factor);
      at::Tensor part = slice_part(tensor, held, needed);
      if (part.size(placement.dim) != padded_size) {
        at::Tensor padded = at::zeros(sizes, tensor.options());
        padded.narrow(placement.dim, 0, part.size(placement.dim)).copy_(part);
        part = padded;
      }
      parts.push_back(part.contiguous());
    }
  }
  at::Tensor received = at::empty(sizes, tensor.options());
  comm::scatter(group, received, parts, root, "distribute_tensor").wait();
  return received.narrow(placement.dim, 0, local_shard_size(n, k, group.rank(), placement.split_factor)).contiguous();
}

// Sends the values of the rank whose coordinates are all `src` to the other ranks, one mesh dim after another: by
// scatter on mesh dims with a shard, else by broadcast. After mesh dim i the ranks whose coordinates on the later mesh
// dims are `src` have received their values, so they are the roots on mesh dim i + 1. Without `src` every rank slices
// its shard from its own `tensor`. On Partial mesh dims the values are first replicated; run_redistribute then makes
// them Partial.
at::Tensor distribute_values(const at::Tensor& tensor, const MeshPtr& mesh, const Placements& placements,
                             std::optional<int> src) {
  if (!mesh->coordinate()) return at::empty(Sizes(tensor.dim(), 0), tensor.options());
  at::Tensor local = tensor;
  Placements order(placements.size(), Replicate());
  if (src && !tensor.is_meta()) {
    for (size_t i = 0; i < placements.size(); ++i) {
      if (mesh->shape()[i] == 1) continue;
      comm::Group& group = *mesh->group(static_cast<int64_t>(i));
      TESSERA_CHECK(*src >= 0 && *src < group.size(), ErrorKind::kShape,
                    "[dtensor.distribute_tensor] src_data_rank: found {}, wanted 0..{} on mesh dim {}.", *src,
                    group.size() - 1, i);
      if (placements[i].is_any_shard()) {
        local = scatter_shards(local, group, placements[i], *src);
      } else {
        local = local.is_same(tensor) ? local.clone(at::MemoryFormat::Contiguous) : local;
        comm::broadcast(group, local, *src, "distribute_tensor").wait();
      }
    }
    order = partial_to_replicated(placements);
  }
  const bool fresh = !local.is_same(tensor);
  return run_redistribute(local, *mesh, plan_redistribute(tensor.sizes(), *mesh, order, placements),
                          /*may_alias=*/fresh);
}

}  // namespace

// The result is a leaf with the requires_grad of `tensor`; autograd does not record the distribution. A DTensor that
// has this mesh and these placements already is returned unchanged.
at::Tensor distribute_tensor(const at::Tensor& tensor, const MeshPtr& mesh, const Placements& placements,
                             std::optional<int> src_data_rank) {
  TESSERA_CHECK(tensor.defined(), ErrorKind::kShape,
                "[dtensor.distribute_tensor] found an undefined tensor, wanted a defined one.");
  TESSERA_CHECK(tensor.is_leaf(), ErrorKind::kShape,
                "[dtensor.distribute_tensor] `distribute_tensor` should be used to distribute leaf tensors! but found "
                "non-leaf tensor! Use from_local, or redistribute a DTensor.");
  Placements checked = placements;
  check_placements("distribute_tensor", *mesh, checked, tensor.dim());
  if (is_dtensor(tensor)) {
    const DTensorImpl& impl = *impl_of(tensor);
    TESSERA_CHECK(
        *impl.mesh() == *mesh, ErrorKind::kShape,
        "[dtensor.distribute_tensor] found a DTensor on {}, cannot distribute it to a different device mesh {}.",
        impl.mesh()->to_string(), mesh->to_string());
    TESSERA_CHECK(impl.placements() == checked, ErrorKind::kShape,
                  "[dtensor.distribute_tensor] found a DTensor with placements {}, cannot distribute it to different "
                  "placements {}. Use redistribute.",
                  to_string(impl.placements()), to_string(checked));
    return tensor;
  }
  at::Tensor local;
  {
    at::NoGradGuard no_grad;
    at::Tensor here = tensor.detach();
    if (!here.is_meta() && here.device() != mesh->device()) here = here.to(mesh->device());
    local = distribute_values(here, mesh, checked, src_data_rank);
  }
  at::Tensor result = make_dtensor(local, mesh, make_shared_placements(checked), tensor.sizes());
  result.set_requires_grad(tensor.requires_grad());
  return result;
}

}  // namespace tessera
