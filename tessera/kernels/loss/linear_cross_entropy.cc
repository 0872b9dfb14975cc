#include "tessera/kernels/loss/linear_cross_entropy.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <limits>

#include "tessera/base/error.h"
#include "tessera/dtensor/rules/table.h"
#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/kernels/autograd/weight_grad_store.h"
#include "tessera/kernels/dispatch/operations.h"
#include "tessera/kernels/dispatch/result_form.h"
#include "tessera/kernels/loss/cross_entropy_sums.h"
#include "tessera/kernels/loss/head_chunks.h"

namespace tessera::kernels {
namespace {

using Triple = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

void check_shapes(c10::IntArrayRef hidden, c10::IntArrayRef weight, const at::Tensor& labels) {
  TESSERA_CHECK(
      hidden.size() == 2 && weight.size() == 2 && labels.dim() == 1 && hidden[1] == weight[1] &&
          labels.size(0) == hidden[0] && labels.scalar_type() == at::kLong,
      ErrorKind::kShape,
      "[kernels.linear_cross_entropy] found {}-d hidden, {}-d weight, {} labels of {}: wanted [N, d], [V, d] and "
      "N int64 labels",
      hidden.size(), weight.size(), labels.numel(), c10::toString(labels.scalar_type()));
}

// This rank's first row among all rows, and the groups over whose ranks the rows are sharded.
struct RowShard {
  int64_t first = 0;
  std::vector<comm::Group*> shard_groups{};
};

int64_t all_reduce_max(const RowShard& part, int64_t value, const at::Tensor& like) {
  if (part.shard_groups.empty()) return value;
  const auto maximum = at::full({1}, value, like.options().dtype(at::kLong));
  for (auto* group : part.shard_groups) comm::all_reduce(*group, maximum, comm::ReduceOp::kMax, "labels").wait();
  return maximum.item<int64_t>();
}

// Raises an error on all ranks if one rank has a wrong label, before any of them waits in a later collective. Labels on
// an accelerator are not checked, because the host would have to wait; they make the loss NaN. COLLECTIVE over all
// groups in part.shard_groups.
void check_labels(const at::Tensor& labels, int64_t classes, const RowShard& part) {
  if (!labels.is_cpu()) return;
  const int64_t own = first_wrong_label(labels, classes);
  const bool any = own >= 0;
  const int64_t at = all_reduce_max(part, any ? part.first + own : -1, labels);
  if (at < 0) return;
  const bool mine = any && at == part.first + own;
  const int64_t value =
      all_reduce_max(part, mine ? labels[own].item<int64_t>() : std::numeric_limits<int64_t>::min(), labels);
  raise(ErrorKind::kShape, "[kernels.linear_cross_entropy] label {}: found {}, wanted one of the {} classes or {}", at,
        value, classes, kIgnoredLabel);
}

Triple with_gradients(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                      bool hidden_gradient, bool weight_gradient, int64_t chunk_bytes, double softcap) {
  check_shapes(hidden.sizes(), weight.sizes(), labels);
  if (hidden.is_meta()) {
    const auto loss = at::empty({}, hidden.options().dtype(wide_type(hidden.scalar_type())));
    return {loss, hidden_gradient ? at::empty_like(hidden) : at::Tensor(),
            weight_gradient ? at::empty(weight.sizes(), weight.options()) : at::Tensor()};
  }
  check_labels(labels, weight.size(0), {});
  const auto sums = cross_entropy_sums(hidden, weight, labels, {.max_classes = weight.size(0)},
                                       {hidden_gradient, weight_gradient, chunk_bytes, softcap});
  return {sums.loss, sums.grad_hidden, sums.grad_weight};
}

// ---- the loss of sharded inputs ----

std::vector<int64_t> mesh_dims_that_cut(const Placements& placements) {
  std::vector<int64_t> dims;
  for (size_t m = 0; m < placements.size(); ++m) {
    if (placements[m].is_any_shard()) dims.push_back(static_cast<int64_t>(m));
  }
  return dims;
}

std::vector<comm::Group*> groups_of(const DeviceMesh& mesh, const std::vector<int64_t>& dims) {
  std::vector<comm::Group*> groups;
  for (const int64_t dim : dims) groups.push_back(mesh.group(dim).get());
  return groups;
}

// Returns this rank's range of a dim that several mesh dims shard.
LocalRange own_range(int64_t size, const DeviceMesh& mesh, const std::vector<int64_t>& dims) {
  LocalRange range{.size = size, .offset = 0};
  for (const int64_t dim : dims) {  // outermost first
    const auto inner = local_range(range.size, mesh.size(dim), mesh.local_rank(dim));
    range = {.size = inner.size, .offset = range.offset + inner.offset};
  }
  return range;
}

// Returns the size of the largest shard of a dim that several mesh dims shard. Shard gives the first rank of a mesh dim
// the largest chunk.
int64_t largest_part(int64_t size, const DeviceMesh& mesh, const std::vector<int64_t>& dims) {
  for (const int64_t dim : dims) size = local_range(size, mesh.size(dim), 0).size;
  return size;
}

// Returns the function that runs on the local shards: some mesh dims shard hidden and labels, others the classes.
// Returns null where no input is sharded.
LocalFunction on_shards(const OpCall& call, const PlacementChoice& choice) {
  const auto class_dims = mesh_dims_that_cut(choice.inputs[1]), row_dims = mesh_dims_that_cut(choice.inputs[2]);
  if (class_dims.empty() && row_dims.empty()) return {};
  const int64_t classes = call.inputs[1].sizes[0], rows = call.inputs[2].sizes[0];
  return [=](const LocalCall& local) {
    const auto hidden = local.arg(0).toTensor(), weight = local.arg(1).toTensor(), labels = local.arg(2).toTensor();
    check_labels(labels, classes, {own_range(rows, local.mesh, row_dims).offset, groups_of(local.mesh, row_dims)});
    const ClassShard part{own_range(classes, local.mesh, class_dims).offset,
                          largest_part(classes, local.mesh, class_dims), groups_of(local.mesh, class_dims)};
    const auto sums = cross_entropy_sums(
        hidden, weight, labels, part,
        {local.arg(3).toBool(), local.arg(4).toBool(), local.arg(5).toInt(), local.arg(6).toDouble()});
    local.finish({sums.loss, sums.grad_hidden, sums.grad_weight});
  };
}

// hidden [N, d], weight [V, d], labels [N] -> loss, grad_hidden, grad_weight
void propose(const OpCall& call, Proposal& proposal) {
  const auto &hidden = call.inputs[0], &weight = call.inputs[1];
  check_shapes(hidden.sizes, weight.sizes, *call.inputs[2].tensor);
  proposal.strategies.push_back({{Partial(), Shard(0), Partial()}, {Shard(0), Replicate(), Shard(0)}});
  proposal.strategies.push_back({{Replicate(), Replicate(), Shard(0)}, {Replicate(), Shard(0), Replicate()}});
  proposal.supports_strided = false;
  proposal.output({});
  proposal.output(hidden.sizes);
  proposal.output(weight.sizes);
  proposal.local = on_shards;
}

// ---- derivative ----

constexpr Operation<&with_gradients> call_with_gradients{"tessera::linear_cross_entropy_with_gradients"};

// Returns `gradient` times `factor`, computed in place unless the graph is kept for another backward.
at::Tensor scaled(const at::Tensor& gradient, const at::Tensor& factor, bool keep) {
  if (!gradient.defined()) return {};
  const auto converted = factor.to(gradient.scalar_type());
  return keep ? gradient * converted : gradient.mul_(converted);
}

struct LinearCrossEntropy : torch::autograd::Function<LinearCrossEntropy> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& hidden, const at::Tensor& weight,
                            const at::Tensor& labels, bool wants_hidden, bool wants_weight, int64_t chunk_bytes,
                            double softcap) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const auto [loss, grad_hidden, grad_weight] =
        call_with_gradients(hidden, weight, labels, wants_hidden, wants_weight, chunk_bytes, softcap);
    // The gradients are stored in saved_data and not by save_for_backward(), so that backward() may scale them in
    // place. FSDP may free the storage of unsharded parameters between forward and backward; the gradients are new
    // tensors and not parameters, so FSDP does not free their storage.
    ctx->saved_data["grad_hidden"] = grad_hidden;
    auto* const grad_store = kernels::WeightGradStore::current();
    const bool stores_gradient = grad_store != nullptr && grad_store->loss_factor && grad_weight.defined();
    if (stores_gradient) grad_store->add(weight, [g = grad_weight.mul_(*grad_store->loss_factor)] { return g; });
    ctx->saved_data["grad_weight"] = stores_gradient ? at::Tensor() : grad_weight;
    return loss;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const bool keep = torch::autograd::get_current_graph_task_keep_graph();
    TESSERA_CHECK(ctx->saved_data.count("grad_hidden"), ErrorKind::kInternal,
                  "[kernels.linear_cross_entropy] found a second backward, wanted one. Set retain_graph in the first.");
    const at::Tensor grad_hidden = ctx->saved_data["grad_hidden"].toTensor();
    const at::Tensor grad_weight = ctx->saved_data["grad_weight"].toTensor();
    if (!keep) ctx->saved_data.clear();
    const at::Tensor none;
    return {scaled(grad_hidden, grads[0], keep), scaled(grad_weight, grads[0], keep), none, none, none, none, none};
  }
};

at::Tensor differentiable(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                          int64_t chunk_bytes, double softcap) {
  const bool grad = at::GradMode::is_enabled();
  return LinearCrossEntropy::apply(hidden, weight, labels, grad && hidden.requires_grad(),
                                   grad && weight.requires_grad(), chunk_bytes, softcap);
}

}  // namespace

void define_linear_cross_entropy(torch::Library& library) {
  library.def(
      "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor labels, int chunk_bytes=67108864, float softcap=0.) "
      "-> Tensor");
  library.impl("linear_cross_entropy",
               torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(differentiable)));
  define_operation(
      library,
      "linear_cross_entropy_with_gradients(Tensor hidden, Tensor weight, Tensor labels, bool hidden_gradient, "
      "bool weight_gradient, int chunk_bytes, float softcap) -> (Tensor, Tensor, Tensor)",
      TORCH_FN(with_gradients), no_derivative(), propose);
}

at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels,
                                const LinearCrossEntropyOptions& options) {
  static const auto op = operation<decltype(differentiable)>("tessera::linear_cross_entropy");
  check_shapes(hidden.sizes(), weight.sizes(), labels);
  return op.call(hidden, weight, replicate_like(labels, hidden), options.chunk_bytes, options.softcap);
}

}  // namespace tessera::kernels
