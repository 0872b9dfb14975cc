// log_softmax and nll_loss with a sharded class dim. loss_parallel.h describes their use.
#include "tessera/dtensor/rules/reductions/loss_parallel.h"

#include <ATen/ATen.h>
#include <ATen/core/Reduction.h>
#include <fmt/ranges.h>

#include <limits>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/dispatch/dispatch.h"
#include "tessera/dtensor/rules/table.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {

namespace {
const comm::ContextKey kLossParallel{"loss parallel"};
}

LossParallel::LossParallel() : in_force_(kLossParallel, this) {}
bool loss_parallel_enabled() noexcept { return comm::ContextValue::innermost(kLossParallel) != nullptr; }

namespace {

// The mesh and placements of the logits, the mesh dim that shards the classes, and the range `own` of this rank's
// classes.
struct ClassShards {
  MeshPtr mesh;
  Placements placements;
  int64_t class_dim;
  int64_t mesh_dim;
  int64_t classes;  // global number
  LocalRange own;

  comm::Group& group() const { return *mesh->group(mesh_dim); }
};

// Returns the mesh dim that shards the classes of `logits`, and this rank's range of classes. Returns nullopt unless
// exactly one mesh dim shards the classes and this rank is in the mesh. Other mesh dims may shard the other tensor dims
// or replicate.
std::optional<ClassShards> class_shards(const at::Tensor& logits, int64_t class_dim) {
  const auto& impl = *impl_of(logits);
  ClassShards shards{impl.mesh(), impl.placements(), class_dim, -1, 0, {}};
  for (int64_t i = 0; i < shards.mesh->ndim(); ++i) {
    const auto& placement = shards.placements[static_cast<size_t>(i)];
    if (placement.is_partial() || (placement.is_any_shard() && placement.dim == class_dim && shards.mesh_dim >= 0)) {
      return std::nullopt;
    }
    if (placement.is_shard(class_dim)) {
      shards.mesh_dim = i;
    } else if (placement.is_strided_shard()) {
      return std::nullopt;
    }
  }
  if (shards.mesh_dim < 0 || !shards.mesh->coordinate()) return std::nullopt;
  shards.classes = logits.size(class_dim);
  shards.own =
      local_range(shards.classes, shards.mesh->size(shards.mesh_dim), shards.mesh->local_rank(shards.mesh_dim));
  return shards;
}

ClassShards checked_class_shards(const at::Tensor& logits, int64_t class_dim) {
  if (auto shards = class_shards(logits, class_dim)) return *shards;
  const auto& placements = impl_of(logits)->placements();
  const auto count = std::ranges::count_if(placements, [&](const Placement& p) { return p.is_shard(class_dim); });
  raise(ErrorKind::kShape,
        "[dtensor.loss_parallel] loss_parallel() requires exactly one mesh dim to shard tensor dimension {}, but got "
        "placements "
        "{} with {} such mesh dim(s). Other mesh dims may be Shard or Replicate. Redistribute the logits, or leave the "
        "LossParallel context.",
        class_dim, to_string(placements), count);
}

at::Tensor reduce(const ClassShards& shards, const at::Tensor& values, ReduceOp op, const char* subject) {
  at::Tensor target = values.contiguous();
  comm::all_reduce(shards.group(), target, op, subject).wait();
  return target;
}

at::Tensor wrap(const at::Tensor& local, const ClassShards& shards, const Placements& placements,
                c10::IntArrayRef sizes) {
  return make_dtensor(local.contiguous(), shards.mesh, make_shared_placements(placements), sizes, dense_strides(sizes));
}

// Returns the placements of tensors that lack the class dim, such as targets and the loss of each row.
Placements row_placements(const ClassShards& shards) {
  Placements rows = shards.placements;
  for (auto& placement : rows) {
    if (placement.is_shard(shards.class_dim)) {
      placement = Replicate();
    } else if (placement.is_shard() && placement.dim > shards.class_dim) {
      placement = Shard(placement.dim - 1);
    }
  }
  return rows;
}

// Returns the local tensor of `tensor` after redistribution to `target_placements`. A plain tensor counts as
// replicated.
at::Tensor to_local_with_placements(const at::Tensor& tensor, const ClassShards& shards,
                                    const Placements& target_placements, const char* tensor_name) {
  const bool plain = !is_dtensor(tensor);
  const Placements whole(shards.placements.size(), Replicate());
  TESSERA_CHECK(!plain || target_placements == whole || implicit_replication_enabled(), ErrorKind::kShape,
                "[dtensor.loss_parallel] {}: found a plain tensor of shape [{}] with logits of placements {}. Wrap it "
                "as a DTensor with placements {}.",
                tensor_name, fmt::join(tensor.sizes(), ", "), to_string(shards.placements),
                to_string(target_placements));
  const auto& from = plain ? whole : impl_of(tensor)->placements();
  const at::Tensor local = plain ? tensor : impl_of(tensor)->local();
  if (from == target_placements) return local;
  return run_redistribute(local, *shards.mesh, plan_redistribute(tensor.sizes(), *shards.mesh, from, target_placements),
                          /*may_alias=*/true);
}

// ---- sums of gradients over the classes ----

// The gradient that nll_loss_backward returns has one nonzero element in each row, so each rank knows the sum of the
// row over all classes. The backward of log_softmax needs this sum. nll_loss_backward caches it in cached_row_sums,
// which saves one all-reduce. find_row_sum() finds the cached sum by the storage of the gradient; it is removed after
// the storage is freed. If the gradient was modified, its version counter or storage differs and the sum is not found.
using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;
struct CachedRowSum {
  WeakStorage storage;
  int64_t numel;
  at::Tensor sum;
};
thread_local std::vector<CachedRowSum> cached_row_sums;

void cache_row_sum(const at::Tensor& gradient, const at::Tensor& sum) {
  std::erase_if(cached_row_sums, [](const CachedRowSum& cached) { return cached.storage.expired(); });
  auto* storage = gradient.storage().unsafeGetStorageImpl();
  cached_row_sums.push_back(
      {WeakStorage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage)), gradient.numel(), sum});
}

// Returns the sum over all classes that cached_row_sums has for this gradient, in the shape of `local`, but with size 1
// in dim class_dim. Returns an undefined tensor if no sum is cached or the gradient was modified.
at::Tensor find_row_sum(const at::Tensor& gradient, const at::Tensor& local, int64_t class_dim) {
  if (gradient.unsafeGetTensorImpl()->version_counter().current_version() != 0 || !local.is_contiguous()) return {};
  for (const auto& cached : cached_row_sums) {
    if (cached.storage.expired() || cached.storage._unsafe_get_target() != local.storage().unsafeGetStorageImpl() ||
        cached.numel != local.numel()) {
      continue;
    }
    std::vector<int64_t> sizes = local.sizes().vec();
    sizes[static_cast<size_t>(class_dim)] = 1;
    return c10::multiply_integers(sizes) == cached.sum.numel() ? cached.sum.reshape(sizes) : at::Tensor();
  }
  return {};
}

// ---- log_softmax ----

// _log_softmax(self, dim, half_to_float). Two all-reduces: the maximum of each row, then the sum of the exponentials.
at::Tensor log_softmax(const at::Tensor& self, int64_t dim, bool half_to_float) {
  const auto shards = checked_class_shards(self, dim);
  const at::Tensor logits = impl_of(self)->local();
  const auto type = half_to_float ? at::kFloat : logits.scalar_type();
  const bool half = logits.scalar_type() == at::kHalf || logits.scalar_type() == at::kBFloat16;
  const at::Tensor x = half ? logits.to(at::kFloat) : logits;
  std::vector<int64_t> row = x.sizes().vec();
  row[static_cast<size_t>(dim)] = 1;
  const at::Tensor own_row_max = shards.own.size > 0
                                     ? x.amax(dim, /*keepdim=*/true)
                                     : at::full(row, -std::numeric_limits<double>::infinity(), x.options());
  const at::Tensor row_max = reduce(shards, own_row_max, ReduceOp::kMax, "log_softmax, largest logit");
  at::Tensor shifted = x - row_max;
  const at::Tensor total = reduce(shards, shifted.exp().sum(dim, /*keepdim=*/true), ReduceOp::kSum, "log_softmax, sum");
  return wrap(shifted.sub_(total.log()).to(type), shards, shards.placements, self.sizes());
}

// _log_softmax_backward_data(grad_output, output, dim, input_dtype). Returns g - softmax * s, where g is the gradient
// of the output and s is the sum of g over all classes.
at::Tensor log_softmax_backward(const ClassShards& shards, const at::Tensor& gradient, const at::Tensor& output,
                                at::ScalarType type) {
  const at::Tensor local = to_local_with_placements(gradient, shards, shards.placements, "gradient of log_softmax");
  at::Tensor sum = find_row_sum(gradient, local, shards.class_dim);
  if (!sum.defined()) {
    sum = reduce(shards, local.sum(shards.class_dim, /*keepdim=*/true), ReduceOp::kSum, "log_softmax, gradient");
  }
  const at::Tensor input = local - impl_of(output)->local().exp() * sum;
  return wrap(input.to(type), shards, shards.placements, output.sizes());
}

// ---- nll_loss ----

// The targets of the rows that this rank holds. All tensors have the shape of the local targets.
struct LocalTargets {
  at::Tensor is_counted;           // true: not ignored
  at::Tensor is_local;             // true: not ignored, and the class is in this rank's shard
  at::Tensor index;                // position in this rank's classes; 0 if not `is_local`
  at::Tensor weight;               // weight of the target's class, 0 if ignored; undefined: all weights are 1
  bool is_weight_sharded = false;  // true: weight is 0 also for classes of other ranks
};

LocalTargets read_targets(const ClassShards& shards, const at::Tensor& target, const at::Tensor& weight,
                          int64_t ignored) {
  LocalTargets t;
  const at::Tensor own = to_local_with_placements(target, shards, row_placements(shards), "target");
  t.is_counted = own.ne(ignored);
  if (own.device().is_cpu()) {
    const at::Tensor outside = t.is_counted.logical_and(own.lt(0).logical_or_(own.ge(shards.classes)));
    TESSERA_CHECK(!outside.any().item<bool>(), ErrorKind::kShape,
                  "[dtensor.loss_parallel] Target {} is out of bounds: there are {} classes.",
                  own.masked_select(outside)[0].item<int64_t>(), shards.classes);
  }
  const at::Tensor shifted = own - shards.own.offset;
  t.is_local = t.is_counted.logical_and(shifted.ge(0)).logical_and_(shifted.lt(shards.own.size));
  t.index = shifted.masked_fill(t.is_local.logical_not(), 0);
  if (!weight.defined()) return t;
  Placements with_classes(shards.placements.size(), Replicate());
  with_classes[static_cast<size_t>(shards.mesh_dim)] = Shard(0);
  t.is_weight_sharded = is_dtensor(weight) && impl_of(weight)->placements() == with_classes;
  if (t.is_weight_sharded) {
    const at::Tensor here = impl_of(weight)->local();
    t.weight = shards.own.size > 0 ? here.take(t.index).masked_fill_(t.is_local.logical_not(), 0)
                                   : at::zeros(own.sizes(), here.options());
  } else {
    const Placements whole(shards.placements.size(), Replicate());
    const at::Tensor all = to_local_with_placements(weight, shards, whole, "weight");
    t.weight = all.take(own.masked_fill(t.is_counted.logical_not(), 0)).masked_fill_(t.is_counted.logical_not(), 0);
  }
  return t;
}

// Returns the placements of a local sum over rows: Partial(sum) on mesh dims that shard rows, else Replicate.
Placements sum_placements(const ClassShards& shards) {
  Placements sums = row_placements(shards);
  for (auto& placement : sums) placement = placement.is_any_shard() ? Partial() : placement;
  return sums;
}

// All-reduces `own`, the sum of the weights of this rank's rows, over the mesh dims that shard rows.
at::Tensor total_weight(const ClassShards& shards, at::Tensor own) {
  const Placements sums = sum_placements(shards);
  for (size_t i = 0; i < sums.size(); ++i) {
    if (sums[i].is_partial()) {
      own = own.contiguous();
      comm::all_reduce(*shards.mesh->group(static_cast<int64_t>(i)), own, ReduceOp::kSum, "nll_loss, weights").wait();
    }
  }
  return own;
}

struct NllLoss {
  at::Tensor loss, total_weight;
};

// nll_loss_forward(self, target, weight?, reduction, ignore_index). The log-probability of a row's target is on the
// rank that holds the target's class. The other ranks contribute 0, so one all-reduce gives the value to all ranks.
NllLoss nll_loss(const at::Tensor& self, const at::Tensor& target, const at::Tensor& weight, int64_t reduction,
                 int64_t ignored) {
  const auto shards = checked_class_shards(self, self.dim() > 1 ? 1 : 0);
  const auto t = read_targets(shards, target, weight, ignored);
  const at::Tensor x = impl_of(self)->local();
  at::Tensor picked = at::zeros(t.index.sizes(), x.options());
  if (shards.own.size > 0) {
    picked = x.gather(shards.class_dim, t.index.unsqueeze(shards.class_dim)).squeeze(shards.class_dim);
    picked = picked.masked_fill(t.is_local.logical_not(), 0);
  }
  at::Tensor weights = t.weight.defined() ? t.weight : t.is_counted.to(x.scalar_type());
  if (t.is_weight_sharded) {  // weights are sharded like the classes: reduce both in one collective
    const at::Tensor both = reduce(shards, at::stack({picked * weights, weights}), ReduceOp::kSum, "nll_loss");
    picked = both[0];
    weights = both[1];
  } else {
    picked = reduce(shards, picked, ReduceOp::kSum, "nll_loss") * weights;
  }
  const at::Tensor rows = -picked;
  const Placements whole(shards.placements.size(), Replicate());
  if (reduction == at::Reduction::None && self.dim() > 1) {
    return {wrap(rows, shards, row_placements(shards), target.sizes()),
            wrap(at::zeros({}, x.options()), shards, whole, {})};
  }
  at::Tensor sum = rows.sum();
  const bool mean = reduction == at::Reduction::Mean;
  const at::Tensor total = mean ? total_weight(shards, weights.sum()) : weights.sum();
  if (mean) sum = sum / total;
  return {wrap(sum, shards, sum_placements(shards), {}),
          wrap(total, shards, mean ? whole : sum_placements(shards), {})};
}

// nll_loss_backward(grad_output, self, target, weight?, reduction, ignore_index, total_weight). Each rank writes the
// gradient of the classes that it holds, so no collective is needed.
at::Tensor nll_loss_backward(const ClassShards& shards, const at::Tensor& gradient, const at::Tensor& self,
                             const at::Tensor& target, const at::Tensor& weight, int64_t reduction, int64_t ignored,
                             const at::Tensor& total) {
  const auto t = read_targets(shards, target, weight, ignored);
  const Placements whole(shards.placements.size(), Replicate());
  const bool rows = reduction == at::Reduction::None && self.dim() > 1;
  at::Tensor scale =
      to_local_with_placements(gradient, shards, rows ? row_placements(shards) : whole, "gradient of nll_loss");
  if (reduction == at::Reduction::Mean) scale = scale / to_local_with_placements(total, shards, whole, "total weight");
  const at::Tensor x = impl_of(self)->local();
  const at::Tensor factor = t.weight.defined() ? t.weight : t.is_counted.to(x.scalar_type());
  const at::Tensor each = (-scale * factor).expand_as(t.index).contiguous();
  at::Tensor result = at::zeros(x.sizes(), x.options());
  if (shards.own.size > 0) {
    result.scatter_(shards.class_dim, t.index.unsqueeze(shards.class_dim),
                    each.masked_fill(t.is_local.logical_not(), 0).unsqueeze(shards.class_dim));
  }
  if (!t.is_weight_sharded) cache_row_sum(result, each);
  return wrap(result, shards, shards.placements, self.sizes());
}

// ---- handlers of log_softmax, nll_loss and their backwards ----

at::Tensor tensor_or_undefined(const c10::IValue& value) { return value.isNone() ? at::Tensor() : value.toTensor(); }

}  // namespace

void handle_log_softmax(const OpInfo& op, c10::DispatchKeySet keys, Stack* stack) {
  const c10::IValue* args = arguments_of(op, *stack);
  const at::Tensor& self = args[0].toTensor();
  if (!loss_parallel_enabled() || !is_dtensor(self) || !impl_of(self)->mesh()->coordinate()) {
    return dispatch_by_rule(op, keys, *stack);
  }
  finish_call(op, *stack, {log_softmax(self, wrap_dim(args[1].toInt(), self.dim()), args[2].toBool())});
}

void handle_log_softmax_backward(const OpInfo& op, c10::DispatchKeySet keys, Stack* stack) {
  const c10::IValue* args = arguments_of(op, *stack);
  const at::Tensor& output = args[1].toTensor();
  const auto shards = loss_parallel_enabled() && is_dtensor(output)
                          ? class_shards(output, wrap_dim(args[2].toInt(), output.dim()))
                          : std::nullopt;
  if (!shards) return dispatch_by_rule(op, keys, *stack);
  const auto type = static_cast<at::ScalarType>(args[3].toInt());
  finish_call(op, *stack, {log_softmax_backward(*shards, args[0].toTensor(), output, type)});
}

void handle_nll_loss(const OpInfo& op, c10::DispatchKeySet keys, Stack* stack) {
  const c10::IValue* args = arguments_of(op, *stack);
  const at::Tensor& self = args[0].toTensor();
  if (!loss_parallel_enabled() || !is_dtensor(self) || !impl_of(self)->mesh()->coordinate()) {
    return dispatch_by_rule(op, keys, *stack);
  }
  const auto result =
      nll_loss(self, args[1].toTensor(), tensor_or_undefined(args[2]), args[3].toInt(), args[4].toInt());
  finish_call(op, *stack, {result.loss, result.total_weight});
}

void handle_nll_loss_backward(const OpInfo& op, c10::DispatchKeySet keys, Stack* stack) {
  const c10::IValue* args = arguments_of(op, *stack);
  const at::Tensor& self = args[1].toTensor();
  const auto shards =
      loss_parallel_enabled() && is_dtensor(self) ? class_shards(self, self.dim() > 1 ? 1 : 0) : std::nullopt;
  if (!shards) return dispatch_by_rule(op, keys, *stack);
  finish_call(op, *stack,
              {nll_loss_backward(*shards, args[0].toTensor(), self, args[2].toTensor(), tensor_or_undefined(args[3]),
                                 args[4].toInt(), args[5].toInt(), args[6].toTensor())});
}

}  // namespace tessera
