#include "tessera/dtensor/functional.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <numeric>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/dtensor/tensor/saved_value.h"

namespace tessera::functional {

using comm::ReduceOp;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::Variable;
using torch::autograd::variable_list;

namespace {

// The backward of each function is the adjoint collective along the same mesh dim. It calls the functions of this file,
// so that it is itself differentiable. save() keeps the MeshAxis in saved_data for the backward.
void save(AutogradContext* ctx, const MeshAxis& axis) { ctx->saved_data["axis"] = make_saved_value(axis); }

const MeshAxis& axis_of(AutogradContext* ctx) { return saved_value<MeshAxis>(ctx->saved_data["axis"]); }

comm::Group& checked_group(const char* verb, const at::Tensor& tensor, const MeshAxis& axis) {
  TESSERA_CHECK(tensor.defined() && !is_dtensor(tensor), ErrorKind::kShape,
                "[functional.{}] found {}, wanted a plain tensor. Use redistribute for DTensors.", verb,
                tensor.defined() ? "a DTensor" : "an undefined tensor");
  TESSERA_CHECK(axis.mesh != nullptr, ErrorKind::kShape,
                "[functional.{}] found no mesh, wanted the mesh to communicate over. Set MeshAxis::mesh.", verb);
  return *axis.mesh->group(axis.mesh_dim);
}

int64_t checked_dim(const char* verb, const at::Tensor& tensor, int64_t dim) {
  const int64_t ndim = tensor.dim();
  TESSERA_CHECK(dim >= -ndim && dim < ndim, ErrorKind::kShape,
                "[functional.{}] found dim {} for a tensor of {} dims. Use a dim of the tensor.", verb, dim, ndim);
  return dim < 0 ? dim + ndim : dim;
}

// Factor by which the backward of a reduction multiplies the gradient: 1 for sums, 1/ranks for averages. Error kShape
// for other reductions.
double weight_of(const char* verb, ReduceOp op, int64_t ranks) {
  TESSERA_CHECK(op == ReduceOp::kSum || op == ReduceOp::kAvg, ErrorKind::kShape,
                "[functional.{}] backward only supports 'sum' and 'avg' reductions, got '{}'.", verb,
                comm::to_string(op));
  return op == ReduceOp::kAvg ? 1.0 / static_cast<double>(ranks) : 1.0;
}

at::Tensor scaled(const at::Tensor& tensor, double weight) { return weight == 1.0 ? tensor : tensor * weight; }

// The result is the sum of the tensors of all ranks, and each rank's loss depends on the result. So the gradient of a
// rank's tensor is the sum of all ranks' gradients of the result.
struct AllReduce : Function<AllReduce> {
  static Variable forward(AutogradContext* ctx, const Variable& tensor, const MeshAxis& axis, ReduceOp op) {
    save(ctx, axis);
    ctx->saved_data["op"] = static_cast<int64_t>(op);
    at::Tensor result = tensor.detach().clone(at::MemoryFormat::Contiguous);
    comm::all_reduce(checked_group("all_reduce", tensor, axis), result, op, "functional").wait();
    return result;
  }
  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    const MeshAxis& axis = axis_of(ctx);
    const auto op = static_cast<ReduceOp>(ctx->saved_data["op"].toInt());
    const double weight = weight_of("all_reduce", op, axis.mesh->size(axis.mesh_dim));
    return {scaled(all_reduce(gradients[0], axis), weight), {}, {}};
  }
};

struct AllGather : Function<AllGather> {
  static Variable forward(AutogradContext* ctx, const Variable& tensor, const MeshAxis& axis, int64_t dim) {
    save(ctx, axis);
    ctx->saved_data["dim"] = dim;
    comm::Group& group = checked_group("all_gather", tensor, axis);
    std::vector<int64_t> sizes = tensor.sizes().vec();
    sizes.insert(sizes.begin(), group.size());
    const at::Tensor all = at::empty(sizes, tensor.options().requires_grad(false));
    comm::all_gather_into(group, all, tensor.detach().contiguous(), "functional").wait();
    // all_gather_into stacks the ranks' tensors along a new first dim. This dim is moved to `dim` and merged with it.
    sizes.erase(sizes.begin());
    sizes[dim] *= group.size();
    return dim == 0 ? all.view(sizes) : all.movedim(0, dim).reshape(sizes);
  }
  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    return {reduce_scatter(gradients[0], axis_of(ctx), ctx->saved_data["dim"].toInt()), {}, {}};
  }
};

struct ReduceScatter : Function<ReduceScatter> {
  static Variable forward(AutogradContext* ctx, const Variable& tensor, const MeshAxis& axis, int64_t dim,
                          ReduceOp op) {
    save(ctx, axis);
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["op"] = static_cast<int64_t>(op);
    comm::Group& group = checked_group("reduce_scatter", tensor, axis);
    std::vector<int64_t> sizes = tensor.sizes().vec();
    sizes[dim] /= group.size();
    at::Tensor input = tensor.detach();
    // reduce_scatter_into scatters slices of dim 0. So `dim` is split into [ranks, size / ranks], and the dim of the
    // ranks is moved to the front.
    if (dim != 0) {
      std::vector<int64_t> split = tensor.sizes().vec();
      split[dim] /= group.size();
      split.insert(split.begin() + dim, group.size());
      input = input.reshape(split).movedim(dim, 0);
    }
    at::Tensor output = at::empty(sizes, tensor.options().requires_grad(false));
    comm::reduce_scatter_into(group, output, input.contiguous(), op, "functional").wait();
    return output;
  }
  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    const MeshAxis& axis = axis_of(ctx);
    const auto op = static_cast<ReduceOp>(ctx->saved_data["op"].toInt());
    const double weight = weight_of("reduce_scatter", op, axis.mesh->size(axis.mesh_dim));
    return {scaled(all_gather(gradients[0], axis, ctx->saved_data["dim"].toInt()), weight), {}, {}, {}};
  }
};

struct AllToAll : Function<AllToAll> {
  static Variable forward(AutogradContext* ctx, const Variable& tensor, const MeshAxis& axis,
                          const std::vector<int64_t>& output_splits, const std::vector<int64_t>& input_splits) {
    save(ctx, axis);
    ctx->saved_data["output_splits"] = output_splits;
    ctx->saved_data["input_splits"] = input_splits;
    std::vector<int64_t> sizes = tensor.sizes().vec();
    if (!output_splits.empty()) sizes[0] = std::accumulate(output_splits.begin(), output_splits.end(), int64_t{0});
    at::Tensor output = at::empty(sizes, tensor.options().requires_grad(false));
    comm::all_to_all_single(checked_group("all_to_all", tensor, axis), output, tensor.detach().contiguous(),
                            output_splits, input_splits, "functional")
        .wait();
    return output;
  }
  // Sends each row's gradient back to the rank that sent the row. So the input_splits of forward are the output splits
  // of this all-to-all, and the output_splits of forward are its input splits.
  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    return {all_to_all(gradients[0], axis_of(ctx), ctx->saved_data["input_splits"].toIntVector(),
                       ctx->saved_data["output_splits"].toIntVector()),
            {},
            {},
            {}};
  }
};

struct Broadcast : Function<Broadcast> {
  static Variable forward(AutogradContext* ctx, const Variable& tensor, const MeshAxis& axis, int64_t root) {
    save(ctx, axis);
    ctx->saved_data["root"] = root;
    at::Tensor result = tensor.detach().clone(at::MemoryFormat::Contiguous);
    comm::broadcast(checked_group("broadcast", tensor, axis), result, static_cast<int>(root), "functional").wait();
    return result;
  }
  static variable_list backward(AutogradContext* ctx, variable_list gradients) {
    // Only the root's tensor was used, so the gradient of the other ranks is 0. It is computed as sum * 0, so that the
    // autograd graph of the backward has the all-reduce on all ranks.
    const MeshAxis& axis = axis_of(ctx);
    const at::Tensor sum = all_reduce(gradients[0], axis);
    const bool is_root = axis.mesh->local_rank(axis.mesh_dim) == ctx->saved_data["root"].toInt();
    return {is_root ? sum : sum * 0, {}, {}};
  }
};

}  // namespace

at::Tensor all_reduce(const at::Tensor& tensor, const MeshAxis& axis, ReduceOp op) {
  checked_group("all_reduce", tensor, axis);
  return AllReduce::apply(tensor, axis, op);
}

at::Tensor all_gather(const at::Tensor& tensor, const MeshAxis& axis, int64_t dim) {
  checked_group("all_gather", tensor, axis);
  return AllGather::apply(tensor, axis, checked_dim("all_gather", tensor, dim));
}

at::Tensor reduce_scatter(const at::Tensor& tensor, const MeshAxis& axis, int64_t dim, ReduceOp op) {
  const comm::Group& group = checked_group("reduce_scatter", tensor, axis);
  const int64_t at = checked_dim("reduce_scatter", tensor, dim);
  TESSERA_CHECK(
      tensor.size(at) % group.size() == 0, ErrorKind::kShape,
      "[functional.reduce_scatter] dim {}: found {} elements, wanted a multiple of the {} ranks. Pad the tensor.", at,
      tensor.size(at), group.size());
  return ReduceScatter::apply(tensor, axis, at, op);
}

at::Tensor all_to_all(const at::Tensor& tensor, const MeshAxis& axis, const std::vector<int64_t>& output_splits,
                      const std::vector<int64_t>& input_splits) {
  checked_group("all_to_all", tensor, axis);
  checked_dim("all_to_all", tensor, 0);
  return AllToAll::apply(tensor, axis, output_splits, input_splits);
}

at::Tensor broadcast(const at::Tensor& tensor, const MeshAxis& axis, int root) {
  checked_group("broadcast", tensor, axis);
  return Broadcast::apply(tensor, axis, static_cast<int64_t>(root));
}

}  // namespace tessera::functional
