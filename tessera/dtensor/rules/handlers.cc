// The table of all handlers (Handler in dispatch/plan.h), and the handlers of operations that have no sharding rule:
// item(), equal(), in-place views, operations that are decomposed, operations that raise an error.
#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/dispatch/dispatch.h"
#include "tessera/dtensor/redistribute/autograd.h"
#include "tessera/dtensor/rules/table.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {

namespace {

// Returns all elements of a DTensor as a plain tensor on every rank. COLLECTIVE over the mesh.
at::Tensor full_local_tensor(const at::Tensor& tensor) {
  if (!is_dtensor(tensor)) return tensor;
  const DTensorImpl& impl = *impl_of(tensor);
  return impl_of(redistribute_values(tensor, Placements(impl.placements().size(), Replicate()), true))->local();
}

// item() of a DTensor: redistributes it to Replicate before the value is read, because the local tensor of a Partial is
// only this rank's contribution to the value.
void handle_item(const OpInfo&, c10::DispatchKeySet, Stack* stack) {
  const at::Tensor local = full_local_tensor(torch::jit::pop(*stack).toTensor());
  stack->emplace_back(local.numel() == 0 ? at::Scalar(0) : local.item());
}

// Returns the tensor redistributed to `to`. A plain tensor and a tensor that has these placements already are returned
// unchanged.
at::Tensor redistributed_to(const at::Tensor& tensor, const Placements& to) {
  return !is_dtensor(tensor) || impl_of(tensor)->placements() == to ? tensor : redistribute_values(tensor, to, true);
}

Placements reduced(const at::Tensor& tensor) { return partial_to_replicated(impl_of(tensor)->placements()); }

int64_t shard_count(const Placements& placements) {
  return std::ranges::count_if(placements, [](const Placement& p) { return p.is_any_shard(); });
}

// Redistributes both tensors to the placements of the one that is sharded on more mesh dims. Each rank then compares
// its local tensors, and an all-reduce combines the results of the ranks. COLLECTIVE over the mesh.
bool equal_by_parts(const at::Tensor& a, const at::Tensor& b) {
  const Placements of_a = reduced(a);
  const Placements of_b = reduced(b);
  const Placements& common = shard_count(of_b) > shard_count(of_a) ? of_b : of_a;
  const bool equal =
      at::equal(impl_of(redistributed_to(a, common))->local(), impl_of(redistributed_to(b, common))->local());
  const MeshPtr& mesh = device_mesh(a);
  if (!mesh->coordinate() || shard_count(common) == 0) return equal;
  const at::Tensor all = at::full({1}, equal, a.options().dtype(at::kByte).device(impl_of(a)->local().device()));
  for (size_t m = 0; m < common.size(); ++m) {
    if (common[m].is_any_shard()) {
      comm::all_reduce(*mesh->group(static_cast<int64_t>(m)), all, ReduceOp::kMin, "equal").wait();
    }
  }
  return all.item<uint8_t>() != 0;
}

void handle_equal(const OpInfo&, c10::DispatchKeySet, Stack* stack) {
  const at::Tensor b = torch::jit::pop(*stack).toTensor();
  const at::Tensor a = torch::jit::pop(*stack).toTensor();
  const bool by_parts = is_dtensor(a) && is_dtensor(b) && device_mesh(a) == device_mesh(b);
  stack->emplace_back(a.sizes() == b.sizes() &&
                      (by_parts ? equal_by_parts(a, b) : at::equal(full_local_tensor(a), full_local_tensor(b))));
}

void handle_is_same_size(const OpInfo&, c10::DispatchKeySet, Stack* stack) {
  const at::Tensor b = torch::jit::pop(*stack).toTensor();
  const at::Tensor a = torch::jit::pop(*stack).toTensor();
  stack->emplace_back(a.sizes() == b.sizes());
}

// Runs the operation on the local tensor. For operations whose result does not depend on which elements a tensor has
// (is_pinned, record_stream).
void handle_locally(const OpInfo& op, c10::DispatchKeySet, Stack* stack) {
  for (const int arg : op.tensor_args) {
    c10::IValue& slot = arguments_of(op, *stack)[arg];
    if (slot.isTensor() && is_dtensor(slot.toTensor())) slot = impl_of(slot.toTensor())->local();
  }
  op.handle.callBoxed(*stack);
}

// Runs the operation on every rank with all tensors replicated. For operations whose output shape depends on values.
void handle_replicated(const OpInfo& op, c10::DispatchKeySet, Stack* stack) {
  const size_t base = stack->size() - op.args.size();
  MeshPtr mesh;
  const auto whole_of = [&mesh](const at::Tensor& tensor, int) {
    mesh = is_dtensor(tensor) ? device_mesh(tensor) : mesh;
    return full_local_tensor(tensor);
  };
  for (const int arg : op.tensor_args) (*stack)[base + arg] = map_tensors((*stack)[base + arg], whole_of);
  op.handle.callBoxed(*stack);
  for (size_t i = base; i < stack->size(); ++i) {
    if ((*stack)[i].isTensor() && (*stack)[i].toTensor().defined()) {
      const at::Tensor local = (*stack)[i].toTensor();
      (*stack)[i] = from_local(local, mesh, Placements(mesh->ndim(), Replicate()));
    }
  }
}

// bincount(self, weights, minlength): the size of the result depends on values. All ranks first compute the global
// maximum and count their local elements into the same number of bins. If self is sharded the result is Partial(sum).
void handle_bincount(const OpInfo& op, c10::DispatchKeySet keys, Stack* stack) {
  const c10::IValue* args = arguments_of(op, *stack);
  const at::Tensor self = args[0].toTensor();
  const auto weights = args[1].toOptional<at::Tensor>();
  const bool weighted = weights && weights->defined();
  TESSERA_CHECK(
      is_dtensor(self) && (!weighted || is_dtensor(*weights)), ErrorKind::kShape,
      "[dtensor.dispatch] {} got mixed torch.Tensor and DTensor: argument '{}' is a plain tensor. Wrap it with "
      "distribute_tensor or from_local.",
      op.name, is_dtensor(self) ? "weights" : "self");
  const bool counts_parts =
      self.dim() == 1 && self.numel() > 0 && at::isIntegralType(self.scalar_type(), /*includeBool=*/false);
  if (!counts_parts) return handle_replicated(op, keys, stack);  // the plain operation raises its errors
  const int64_t minlength = args[2].toInt();
  const Placements common = reduced(self);
  const at::Tensor values = redistributed_to(self, common);
  const int64_t least = values.min().item<int64_t>(), most = values.max().item<int64_t>();  // the same on all ranks
  TESSERA_CHECK(
      least >= 0 && minlength >= 0 && (!weighted || weights->sizes() == self.sizes()), ErrorKind::kShape,
      "[dtensor.bincount] found values from {}, weights {}, minlength {}: bincount only supports 1-d non-negative "
      "integral inputs, weights of their shape and a minlength of 0 or more.",
      least, weighted ? fmt::format("[{}]", fmt::join(weights->sizes(), ", ")) : "none", minlength);
  std::optional<at::Tensor> own_weights;
  if (weighted) own_weights = impl_of(redistributed_to(*weights, common))->local();
  // `dtype` is the dtype of the result. The local counts are converted to it, because for a local tensor without
  // elements bincount returns int64, whatever the dtype of the weights is.
  const auto dtype = !weighted ? at::kLong : weights->scalar_type() == at::kFloat ? at::kFloat : at::kDouble;
  const at::Tensor counted =
      at::bincount(impl_of(values)->local(), own_weights, std::max(most + 1, minlength)).to(dtype);
  Placements result;
  for (const auto& placement : common) result.push_back(placement.is_any_shard() ? Placement(Partial()) : placement);
  finish_call(op, *stack, {from_local(counted, device_mesh(self), result)});
}

// index(self, indices): with boolean masks the output shape depends on values, so all tensors are replicated. A call
// without masks uses the sharding rule of index.
void handle_index(const OpInfo& op, c10::DispatchKeySet keys, Stack* stack) {
  const auto indices = arguments_of(op, *stack)[1].toListRef();
  const bool masks = std::ranges::any_of(indices, [](const c10::IValue& index) {
    return index.isTensor() && index.toTensor().defined() &&
           (index.toTensor().scalar_type() == at::kBool || index.toTensor().scalar_type() == at::kByte);
  });
  masks ? handle_replicated(op, keys, stack) : dispatch_by_rule(op, keys, *stack);
}

void refuse_storage_change(const OpInfo& op, c10::DispatchKeySet, Stack*) {
  raise(ErrorKind::kShape,
        "[dtensor.dispatch] {}: a DTensor has no storage of its own, so the storage cannot be resized or replaced. "
        "Make a new tensor, or call it on to_local().",
        op.name);
}

// squeeze_() and similar: runs the out-of-place view and copies its sizes, strides and local tensor to self.
void handle_in_place_view(const OpInfo& op, c10::DispatchKeySet, Stack* stack) {
  const at::Tensor self = arguments_of(op, *stack)[0].toTensor();
  std::string name = op.name.substr(0, op.name.find('.'));
  name.pop_back();
  std::string overload = op.name.find('.') == std::string::npos ? "" : op.name.substr(op.name.find('.') + 1);
  overload = name == "aten::transpose" ? "int" : overload;
  c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str()).callBoxed(stack);
  const at::Tensor view = torch::jit::pop(*stack).toTensor();
  self.unsafeGetTensorImpl()->shallow_copy_from(view.getIntrusivePtr());
  stack->emplace_back(self);
}

// as_strided(self, size, stride, storage_offset): allowed only with the sizes, strides and offset that self has
// already.
void handle_as_strided(const OpInfo& op, c10::DispatchKeySet, Stack* stack) {
  const c10::IValue* args = arguments_of(op, *stack);
  const at::Tensor self = args[0].toTensor();
  check_as_strided(op.name, self, args[1].toIntVector(), args[2].toIntVector(), args[3].isNone() ? 0 : args[3].toInt());
  finish_call(op, *stack, {op.name.find("strided_") == std::string::npos ? at::alias(self) : self});
}

// _amp_foreach_non_finite_check_and_unscale_(self[], found_inf, inv_scale): found_inf may be a plain tensor. Each rank
// checks its local gradients; an all-reduce over each mesh dim that shards a gradient then makes found_inf the same on
// all ranks of this mesh dim.
void handle_unscale(const OpInfo& op, c10::DispatchKeySet, Stack* stack) {
  const at::Tensor inv_scale = full_local_tensor(torch::jit::pop(*stack).toTensor());
  const at::Tensor found_inf = torch::jit::pop(*stack).toTensor();
  const auto gradients = torch::jit::pop(*stack).toTensorVector();
  at::Tensor local_found = is_dtensor(found_inf) ? impl_of(found_inf)->local() : found_inf;
  std::vector<at::Tensor> locals;
  std::vector<comm::Group*> groups;
  for (const auto& gradient : gradients) {
    const DTensorImpl& impl = checked_impl("unscale", gradient);
    locals.push_back(impl.local());
    for (size_t m = 0; m < impl.placements().size(); ++m) {
      TESSERA_CHECK(
          !impl.placements()[m].is_partial(), ErrorKind::kShape,
          "Sharding dimension mismatch: [dtensor.dispatch] {}: a gradient of shape [{}] has placements {}, wanted "
          "reduced ones. Redistribute it first.",
          op.name, fmt::join(gradient.sizes(), ", "), to_string(impl.placements()));
      comm::Group* group = impl.mesh()->coordinate() && impl.placements()[m].is_any_shard()
                               ? impl.mesh()->group(static_cast<int64_t>(m)).get()
                               : nullptr;
      if (group != nullptr && std::ranges::find(groups, group) == groups.end()) groups.push_back(group);
    }
  }
  at::_amp_foreach_non_finite_check_and_unscale_(locals, local_found, inv_scale);
  for (comm::Group* group : groups) comm::all_reduce(*group, local_found, ReduceOp::kMax, "found_inf").wait();
}

// _fused_adam(self[], grads[], exp_avgs[], ...): the functional form writes to copies of its arguments, so all lists
// can be redistributed to the parameters' placements before it is decomposed.
void handle_fused_functional(const OpInfo& op, c10::DispatchKeySet keys, Stack* stack) {
  c10::IValue* args = arguments_of(op, *stack);
  const auto parameters = args[0].toTensorVector();
  constexpr int kLists = 5;  // self to max_exp_avg_sqs
  for (int arg = 0; arg < kLists; ++arg) {
    std::vector<at::Tensor> tensors = args[arg].toTensorVector();
    for (size_t i = 0; i < tensors.size() && i < parameters.size(); ++i) {
      tensors[i] = is_dtensor(parameters[i]) ? redistributed_to(tensors[i], reduced(parameters[i])) : tensors[i];
    }
    args[arg] = std::move(tensors);
  }
  decompose(op, keys, stack);
}

// _native_batch_norm_legit_functional(input, weight, bias, running_mean, running_var, ...): redistributes running_mean
// and running_var to common placements (Replicate on each mesh dim on which one is Partial or the two differ), then
// decomposes the operation.
void handle_batch_norm_functional(const OpInfo& op, c10::DispatchKeySet keys, Stack* stack) {
  c10::IValue& mean = arguments_of(op, *stack)[3];
  c10::IValue& variance = arguments_of(op, *stack)[4];
  if (is_dtensor(mean.toTensor()) && is_dtensor(variance.toTensor())) {
    Placements common = reduced(mean.toTensor());
    const Placements other = reduced(variance.toTensor());
    for (size_t m = 0; m < common.size(); ++m) common[m] = common[m] == other[m] ? common[m] : Replicate();
    mean = redistributed_to(mean.toTensor(), common);
    variance = redistributed_to(variance.toTensor(), common);
  }
  decompose(op, keys, stack);
}

}  // namespace

Handler find_handler(const std::string& name) {
  static const std::unordered_map<std::string, Handler> handlers = {
      {"aten::_local_scalar_dense", handle_item},
      {"aten::equal", handle_equal},
      {"aten::is_same_size", handle_is_same_size},
      {"aten::is_pinned", handle_locally},
      {"aten::bincount", handle_bincount},
      {"aten::nonzero", handle_replicated},
      {"aten::masked_select", handle_replicated},
      {"aten::index.Tensor", handle_index},
      {"aten::_unique", handle_replicated},
      {"aten::_unique2", handle_replicated},
      {"aten::record_stream", handle_locally},
      {"aten::_amp_foreach_non_finite_check_and_unscale_", handle_unscale},
      {"aten::squeeze_", handle_in_place_view},
      {"aten::squeeze_.dim", handle_in_place_view},
      {"aten::squeeze_.dims", handle_in_place_view},
      {"aten::unsqueeze_", handle_in_place_view},
      {"aten::transpose_", handle_in_place_view},
      {"aten::t_", handle_in_place_view},
      {"aten::detach_", handle_in_place_view},
      {"aten::as_strided", handle_as_strided},
      {"aten::as_strided_", handle_as_strided},
      {"aten::new_empty_strided", handle_new_empty_strided},
      {"aten::_log_softmax", handle_log_softmax},
      {"aten::_log_softmax_backward_data", handle_log_softmax_backward},
      {"aten::nll_loss_forward", handle_nll_loss},
      {"aten::nll_loss2d_forward", handle_nll_loss},
      {"aten::nll_loss_backward", handle_nll_loss_backward},
      {"aten::nll_loss2d_backward", handle_nll_loss_backward},
      {"aten::set_", refuse_storage_change},
      {"aten::set_.source_Tensor", refuse_storage_change},
      {"aten::set_.source_Storage", refuse_storage_change},
      {"aten::set_.source_Storage_storage_offset", refuse_storage_change},
      {"aten::resize_", refuse_storage_change},
      {"aten::resize_as_", refuse_storage_change},
      // Functional forms of in-place operations. Each is decomposed: it copies the tensors that the in-place form
      // writes and calls the in-place form on the copies.
      {"aten::_fused_adam", handle_fused_functional},
      {"aten::_fused_adam.tensor_lr", handle_fused_functional},
      {"aten::_fused_adamw", handle_fused_functional},
      {"aten::_fused_adamw.tensor_lr", handle_fused_functional},
      {"aten::_native_batch_norm_legit_functional", handle_batch_norm_functional},
      {"aten::_batch_norm_with_update_functional", handle_batch_norm_functional},
      {"aten::normal_functional", decompose},
  };
  const auto found = handlers.find(name);
  return found == handlers.end() ? nullptr : found->second;
}

bool dispatches_by_rule(Handler handler) {
  constexpr Handler kAsking[] = {handle_index,       handle_new_empty_strided,
                                 handle_log_softmax, handle_log_softmax_backward,
                                 handle_nll_loss,    handle_nll_loss_backward};
  return std::ranges::find(kAsking, handler) != std::end(kAsking);
}

}  // namespace tessera
