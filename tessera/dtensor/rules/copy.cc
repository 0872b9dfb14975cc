// Operations that make tensors like others, and calls that need no rule: item(), equal(), refusals.
#include <ATen/ATen.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/detail/autograd.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/rules/table.h"

namespace tessera::detail {

namespace {

// zeros_like and its like read no values: what is partial becomes whole for free.
void propose_like(const OpCall& call, Proposal& proposal) {
  const auto& self = call.inputs[0];
  for (int64_t dim = 0; dim < self.dim(); ++dim) {
    proposal.strategies.push_back({{Shard(dim)}, {Shard(dim)}});
  }
  for (const Placement& p : partials_among(call)) {
    proposal.strategies.push_back({{Replicate()}, {p}});
  }
  proposal.output(self.sizes);
}

// new_zeros(self, size): the shards of self when the shape is the same, else whole on every rank.
void propose_new(const OpCall& call, Proposal& proposal, bool keep_partial) {
  const auto& self = call.inputs[0];
  const std::vector<int64_t> sizes = call.ints_at(call.arg_named("size"));
  Choice choice{{self.placements}, {self.placements}};
  for (auto& placement : choice.outputs[0]) {
    if (self.sizes != c10::IntArrayRef(sizes) || (placement.is_partial() && !keep_partial)) {
      placement = Replicate();
    }
  }
  const int stride = call.arg_named("stride");
  proposal.outputs.push_back({sizes, call.ints_at(stride)});
  proposal.choice = std::move(choice);
  proposal.rewrite = [stride](const OpCall& of, const Choice& chosen, const std::vector<OutputShape>& shapes) {
    const Sizes local = local_sizes(shapes[0].sizes, *of.mesh, chosen.outputs[0]);
    Rewrites rewrites{{of.arg_named("size"), c10::List<int64_t>(c10::IntArrayRef(local))}};
    if (of.has(stride)) {
      const Sizes strides = strides_like(local, shapes[0].sizes, shapes[0].strides);
      rewrites.emplace_back(stride, c10::List<int64_t>(c10::IntArrayRef(strides)));
    }
    return rewrites;
  };
}

at::Tensor whole(const at::Tensor& tensor) {
  if (!is_dtensor(tensor)) {
    return tensor;
  }
  const DTensorImpl& impl = *impl_of(tensor);
  return impl_of(redistribute_values(tensor, Placements(impl.placements().size(), Replicate()), true))->local();
}

// Reduces first: the value of a Partial is not that of its local part.
void handle_item(const OpEntry&, c10::DispatchKeySet, Stack* stack) {
  const at::Tensor local = whole(torch::jit::pop(*stack).toTensor());
  stack->emplace_back(local.numel() == 0 ? at::Scalar(0) : local.item());
}

void handle_equal(const OpEntry&, c10::DispatchKeySet, Stack* stack) {
  const at::Tensor b = torch::jit::pop(*stack).toTensor();
  const at::Tensor a = torch::jit::pop(*stack).toTensor();
  stack->emplace_back(a.sizes() == b.sizes() && at::equal(whole(a), whole(b)));
}

void handle_is_same_size(const OpEntry&, c10::DispatchKeySet, Stack* stack) {
  const at::Tensor b = torch::jit::pop(*stack).toTensor();
  const at::Tensor a = torch::jit::pop(*stack).toTensor();
  stack->emplace_back(a.sizes() == b.sizes());
}

// Asks or tells the local tensor something that is the same for the whole.
void handle_locally(const OpEntry& op, c10::DispatchKeySet, Stack* stack) {
  const size_t base = stack->size() - op.args.size();
  for (const int arg : op.tensor_args) {
    c10::IValue& slot = (*stack)[base + arg];
    if (slot.isTensor() && is_dtensor(slot.toTensor())) {
      slot = impl_of(slot.toTensor())->local();
    }
  }
  op.handle.callBoxed(*stack);
}

void refuse(const OpEntry& op, c10::DispatchKeySet, Stack*) {
  raise(ErrorKind::kShape,
        "[dtensor.dispatch] {}: a DTensor has no storage of its own to point elsewhere or to resize. Make a new tensor, or "
        "work on to_local().", op.name);
}

}  // namespace

void add_copy_rules(RuleTable& table) {
  table.add({"aten::empty_like", "aten::zeros_like", "aten::ones_like", "aten::full_like"}, propose_like);
  table.add({"aten::new_zeros", "aten::new_ones", "aten::new_full"},
            [](const OpCall& call, Proposal& proposal) { propose_new(call, proposal, false); });
  table.add({"aten::new_empty", "aten::new_empty_strided"},
            [](const OpCall& call, Proposal& proposal) { propose_new(call, proposal, true); });
}

Handler find_builtin_handler(const std::string& name) {
  static const std::unordered_map<std::string, Handler> handlers = {
      {"aten::_local_scalar_dense", handle_item},
      {"aten::equal", handle_equal},
      {"aten::is_same_size", handle_is_same_size},
      {"aten::is_pinned", handle_locally},
      {"aten::record_stream", handle_locally},
      {"aten::set_", refuse},
      {"aten::set_.source_Tensor", refuse},
      {"aten::set_.source_Storage", refuse},
      {"aten::set_.source_Storage_storage_offset", refuse},
      {"aten::resize_", refuse},
      {"aten::resize_as_", refuse},
      {"aten::as_strided", refuse},
      {"aten::as_strided_", refuse},
  };
  const auto found = handlers.find(name);
  return found == handlers.end() ? nullptr : found->second;
}

}  // namespace tessera::detail
