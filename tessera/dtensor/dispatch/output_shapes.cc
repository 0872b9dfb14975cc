// Finds the sizes, strides and dtypes of results that the rule does not give, by running the operation on meta tensors.
#include <ATen/ATen.h>
#include <ATen/TensorIterator.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/dispatch/plan.h"

namespace tessera {

namespace {

at::Tensor to_meta(const at::Tensor& tensor, c10::IntArrayRef strides) {
  at::Tensor meta = at::empty_strided(tensor.sizes(), strides, tensor.options().device(at::kMeta));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

// Returns the argument with meta tensors of the global sizes. If the operation is a view and gathers its input, the
// meta tensor has the strides of the gathered copy. Every other input keeps its global strides, also if it is
// redistributed, so that results get the strides that plain tensors would give.
c10::IValue to_meta(const OpCall& call, int arg, const std::vector<bool>& moved) {
  return map_tensors(call.args[arg], [&](const at::Tensor& tensor, int element) {
    bool gathered = false;
    for (size_t i = 0; i < moved.size() && arg == call.op.view_of; ++i) {
      gathered = gathered || (moved[i] && call.inputs[i].arg == arg && call.inputs[i].element == element);
    }
    return gathered ? to_meta(tensor, gathered_copy_strides(tensor.sizes(), tensor.strides()))
                    : to_meta(tensor, tensor.strides());
  });
}

}  // namespace

std::vector<OutputShape> infer_outputs(const OpCall& call, const std::vector<bool>& moved) {
  Stack stack;
  for (size_t arg = 0; arg < call.args.size(); ++arg) {
    if (call.op.args[arg].is_tensor_or_list) {
      stack.push_back(to_meta(call, static_cast<int>(arg), moved));
    } else {
      stack.push_back(call.args[arg].isDevice() ? c10::IValue(c10::Device(at::kMeta)) : call.args[arg]);
    }
  }
  try {
    call.op.handle.callBoxed(stack);
  } catch (const c10::NotImplementedError& error) {
    raise(ErrorKind::kInternal,
          "[dtensor.rule] {}: the rule gives no output shapes and the operation has no meta kernel. "
          "Give Proposal::outputs. {}",
          call.name(), error.what_without_backtrace());
  }
  std::vector<OutputShape> shapes;
  const auto& returns = call.op.handle.schema().returns();
  const auto add = [&](const at::Tensor& tensor, bool view) {
    OutputShape shape;
    if (tensor.defined()) {
      shape.sizes = tensor.sizes().vec();
      shape.dtype = tensor.scalar_type();
      if (view || !tensor.is_contiguous()) shape.strides = tensor.strides().vec();
    }
    shapes.push_back(std::move(shape));
  };
  for (size_t i = 0; i < stack.size(); ++i) {
    const bool view = returns[i].alias_info() != nullptr;
    if (stack[i].isTensor()) {
      add(stack[i].toTensor(), view);
    } else if (stack[i].isTensorList()) {
      for (const auto& element : stack[i].toListRef()) add(element.toTensor(), view);
    }
  }
  return shapes;
}

namespace {

std::vector<bool> moved_inputs(const OpCall& call, const PlacementChoice& choice) {
  std::vector<bool> moved;
  for (size_t i = 0; i < call.inputs.size(); ++i) moved.push_back(choice.inputs[i] != call.inputs[i].placements);
  return moved;
}

bool all_contiguous(const OpCall& call) {
  return std::ranges::all_of(call.inputs, [](const TensorInput& input) { return input.tensor->is_contiguous(); });
}

// Returns the shape and strides that TensorIterator gives the result of a pointwise operation on the inputs.
std::vector<OutputShape> pointwise_output(const OpCall& call) {
  at::TensorIteratorConfig config;
  config.set_check_mem_overlap(false)
      .check_all_same_dtype(false)
      .check_all_same_device(false)
      .declare_static_dtype_and_device(at::kByte, at::kMeta)
      .add_owned_output(at::Tensor());
  for (const auto& input : call.inputs) config.add_owned_const_input(to_meta(*input.tensor, input.tensor->strides()));
  auto operands = config.build();
  return {{operands.output().sizes().vec(), operands.output().strides().vec()}};
}

// Returns the output shapes from the meta kernel, or from pointwise_output() for a rule with has_pointwise_strides.
// Empty if neither is available; the results are then contiguous.
std::vector<OutputShape> try_infer_outputs(const OpCall& call, const std::vector<bool>& moved,
                                           const Proposal& proposal) {
  try {
    if (call.op.handle.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) return infer_outputs(call, moved);
  } catch (const std::exception&) {  // the meta kernel fails or only raises an error
  }
  const bool pointwise = proposal.has_pointwise_strides && proposal.outputs.size() == 1;
  return pointwise ? pointwise_output(call) : std::vector<OutputShape>();
}

}  // namespace

// Two properties of the outputs can be missing. The strides are needed only if an operand is not contiguous. The dtype
// is needed on a rank outside the mesh, because this rank runs no operation that would give it. If neither is missing,
// the function returns without running the operation on meta tensors.
void complete_outputs(const OpCall& call, const PlacementChoice& choice, bool inferred, Proposal& proposal) {
  auto& shapes = proposal.outputs;
  const std::vector<bool> moved = moved_inputs(call, choice);
  const bool contiguous = all_contiguous(call);
  const bool strides_are_open =
      inferred ? std::ranges::find(moved, true) != moved.end()
               : std::ranges::any_of(shapes, [](const OutputShape& shape) { return shape.strides.empty(); });
  const bool outside = !call.mesh->coordinate();
  if (!(!contiguous && strides_are_open) && !(outside && !inferred)) return;
  const auto found = try_infer_outputs(call, moved, proposal);
  for (size_t i = 0; i < shapes.size() && i < found.size(); ++i) {
    if (shapes[i].sizes == found[i].sizes) {
      if (!contiguous && (inferred || shapes[i].strides.empty())) shapes[i].strides = found[i].strides;
      shapes[i].dtype = shapes[i].dtype ? shapes[i].dtype : found[i].dtype;
    }
  }
}

}  // namespace tessera
