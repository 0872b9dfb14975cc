// Makes the plan of a call (struct Plan) from the operation, the rule and the arguments.
#include "tessera/dtensor/dispatch/plan.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include "tessera/base/error.h"
#include "tessera/dtensor/dispatch/dispatch.h"
#include "tessera/dtensor/redistribute/equal_on_ranks.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {

namespace {

// Checks a plain tensor among DTensors. It may be used as if it were Replicate in two cases: the operation only reads
// it, and it has one element or an ImplicitReplication object exists; or PyTorch itself may have made it
// (`may_be_made`), and its values are equal on all ranks. In all other cases raises Error kShape.
void check_plain(const OpInfo& op, const DeviceMesh& mesh, const at::Tensor& tensor, int arg, int element) {
  const bool read = !op.args[arg].is_written;
  const auto* operation = AllowInternalPlainTensors::operation();
  // In a backward, the autograd engine makes plain tensors of zeros for undefined gradients, and derivative formulas
  // call operations such as at::ones, at::arange and at::zeros, which make plain tensors. Composite operations make
  // such plain tensors, too. They have the same values on all ranks and are accepted as replicated. But a plain tensor
  // may also come from the user and differ between ranks, so all ranks compare a hash of its values. COLLECTIVE over
  // the mesh.
  const bool may_be_made = in_backward() || (read && operation != nullptr);
  const bool may = (read && (tensor.numel() == 1 || implicit_replication_enabled())) ||
                   (may_be_made && is_equal_on_all_ranks(tensor, mesh, op.name));
  if (operation != nullptr && !may) {
    raise(ErrorKind::kShape,
          "[dtensor.dispatch] {} is not supported for DTensors: its implementation {} a plain tensor of shape [{}] in "
          "{}. Call it on to_local() or full_tensor().",
          *operation, read ? "reads" : "writes to", fmt::join(tensor.sizes(), ", "), op.name);
  }
  TESSERA_CHECK(
      may, ErrorKind::kShape,
      "[dtensor.dispatch] {} got mixed torch.Tensor and DTensor: argument '{}'{} is a plain tensor of shape [{}], "
      "need to convert all torch.Tensor to DTensor before calling distributed operators! "
      "Wrap it with distribute_tensor or from_local, or create an ImplicitReplication if its values are the same on "
      "all ranks.",
      op.name, op.args[arg].name, element < 0 ? "" : fmt::format("[{}]", element), fmt::join(tensor.sizes(), ", "));
}

// Reads the tensor arguments of a call. All DTensors must be on one mesh. An argument that is written only if a flag is
// true (batch norm's `training`) has is_written only then.
OpCall read_call(const OpInfo& op, c10::ArrayRef<c10::IValue> args) {
  MeshPtr mesh;
  for_each_tensor(op, args, [&](const at::Tensor& tensor, int, int) {
    if (!is_dtensor(tensor)) return;
    const MeshPtr& own = impl_of(tensor)->mesh();
    TESSERA_CHECK(!mesh || *mesh == *own, ErrorKind::kShape,
                  "[dtensor.dispatch] Cannot run {} on inputs with different meshes: got {} and {}. "
                  "Bring them to one mesh through full_tensor and distribute_tensor.",
                  op.name, mesh->to_string(), own->to_string());
    mesh = own;
  });
  std::vector<TensorInput> inputs;
  std::vector<TensorInput> outs;
  for_each_tensor(op, args, [&](const at::Tensor& tensor, int arg, int element) {
    const bool written = op.args[arg].is_written && (op.write_flag_arg < 0 || args[op.write_flag_arg].toBool());
    TensorInput input{arg, element, &tensor, {}, tensor.sizes(), written};
    if (is_dtensor(tensor)) {
      input.placements = impl_of(tensor)->placements();
    } else {
      check_plain(op, *mesh, tensor, arg, element);
      input.placements.assign(mesh->ndim(), Replicate());
    }
    (op.args[arg].is_out_argument ? outs : inputs).push_back(std::move(input));
  });
  return OpCall(op, args, std::move(mesh), std::move(inputs), std::move(outs));
}

// Number of output placements: one for each returned tensor, or for each element of a returned list.
size_t count_outputs(const OpCall& call, const std::vector<OutputShape>& shapes) {
  size_t tensors = 0;
  for (const auto& returned : call.op.handle.schema().returns()) {
    tensors += returned.type()->kind() == c10::TypeKind::TensorType;
  }
  return std::max(tensors, shapes.size());
}

bool returns_new_tensors(const OpInfo& op) {
  const auto& returns = op.handle.schema().returns();
  for (size_t i = 0; i < returns.size(); ++i) {
    if (op.return_alias[i] < 0 && holds_tensors(*returns[i].type())) return true;
  }
  return false;
}

// Lists the outputs that are arguments, as in in-place and out= forms. They keep the placements of these arguments.
FixedOutputs fixed_outputs(const OpCall& call) {
  FixedOutputs fixed;
  for (size_t i = 0; i < call.op.return_alias.size(); ++i) {
    const int arg = call.op.return_alias[i];
    if (arg < 0) continue;
    for (const auto* list : {&call.inputs, &call.outs}) {
      for (const auto& input : *list) {
        if (input.arg == arg) fixed.emplace_back(i, input.placements);
      }
    }
  }
  return fixed;
}

void check_strict(const OpCall& call, const Proposal& proposal, const PlacementChoice& choice) {
  for (size_t i = 0; i < choice.inputs.size(); ++i) {
    TESSERA_CHECK(
        !proposal.forbids_redistribution || choice.inputs[i] == call.inputs[i].placements, ErrorKind::kShape,
        "Sharding dimension mismatch: [dtensor.dispatch] {}: {} It cannot be performed without redistribution, "
        "which is disallowed by the "
        "current operator. Please redistribute the tensor to {} before this operation.",
        call.describe(), proposal.forbids_reason, to_string(choice.inputs[i]));
  }
}

void check_outs(const OpCall& call, const PlacementChoice& choice, const std::vector<OutputShape>& shapes) {
  const auto& outs = call.outs;
  for (size_t i = 0; i < outs.size() && i < choice.outputs.size(); ++i) {
    TESSERA_CHECK(outs[i].placements == choice.outputs[i], ErrorKind::kShape,
                  "Sharding dimension mismatch: [dtensor.dispatch] {}: out has placements {}, the result {}. "
                  "Use the version without out.",
                  call.describe(), to_string(outs[i].placements), to_string(choice.outputs[i]));
    TESSERA_CHECK(
        i >= shapes.size() || outs[i].sizes == c10::IntArrayRef(shapes[i].sizes), ErrorKind::kShape,
        "[dtensor.dispatch] {}: out has shape [{}], the result [{}]. A DTensor is not resized: use the version "
        "without out.",
        call.describe(), fmt::join(outs[i].sizes, ", "), fmt::join(shapes[i].sizes, ", "));
  }
}

// Copies the results of a local function, which are new tensors, into the caller's out= tensors.
LocalFunction with_copy_to_outs(const OpCall& call, LocalFunction local) {
  c10::SmallVector<int, 4> positions;
  for (const auto& out : call.outs) positions.push_back(out.arg);
  return [positions, local = std::move(local)](const LocalCall& of) {
    c10::SmallVector<at::Tensor, 4> outs;
    for (const int position : positions) outs.push_back(of.arg(position).toTensor());
    local(of);
    const size_t base = of.stack.size() - outs.size();
    for (size_t i = 0; i < outs.size(); ++i) {
      if (!of.stack[base + i].toTensor().is_same(outs[i])) outs[i].copy_(of.stack[base + i].toTensor());
    }
  };
}

TensorSpec spec_of(const OpCall& call, const Placements& placements, const OutputShape& shape) {
  TensorSpec spec{
      make_shared_placements(placements), Sizes(shape.sizes.begin(), shape.sizes.end()), {}, call.op.view_of >= 0, {}};
  const Sizes strides(shape.strides.begin(), shape.strides.end());
  if (!strides.empty() && !has_same_layout(spec.sizes, strides, dense_strides(spec.sizes))) {
    spec.strides = strides;
    spec.local_strides = strides_in_order(local_sizes(spec.sizes, *call.mesh, placements), strides);
  }
  spec.dtype = shape.dtype.value_or(call.inputs.empty() ? at::kFloat : call.inputs[0].tensor->scalar_type());
  return spec;
}

// Returns one OutputPlan for each return of the operation's schema. `choice.outputs` and `shapes` have one entry for
// each output tensor, in the order of the schema's returns. A return that is a list of tensors gets all entries after
// those of the returns before it.
std::vector<OutputPlan> plan_outputs(const OpCall& call, const PlacementChoice& choice,
                                     const std::vector<OutputShape>& shapes) {
  const auto& returns = call.op.handle.schema().returns();
  std::vector<OutputPlan> outputs(returns.size());
  size_t next = 0;
  const auto spec = [&] {
    const size_t i = next++;
    return spec_of(call, choice.outputs.at(i), shapes.at(i));
  };
  for (size_t i = 0; i < returns.size(); ++i) {
    OutputPlan& output = outputs[i];
    if (call.op.return_alias[i] >= 0) {
      output.kind = OutputPlan::Kind::kArgument;
      output.argument = call.op.return_alias[i];
      ++next;
    } else if (returns[i].type()->kind() == c10::TypeKind::TensorType) {
      output.kind = OutputPlan::Kind::kTensor;
      output.tensors.push_back(spec());
    } else if (holds_tensors(*returns[i].type())) {
      output.kind = OutputPlan::Kind::kList;
      while (next < shapes.size()) output.tensors.push_back(spec());
    }
  }
  return outputs;
}

}  // namespace

// The order of the steps matters. First the rule writes its proposal. If the rule gives no output shapes they are
// inferred, because choose() needs the number of outputs. Then choose() selects the placements and the checks raise
// their errors. Last, complete_outputs() fills in the strides for these placements. Only check_plain() communicates.
std::shared_ptr<const Plan> make_plan(const OpInfo& op, c10::ArrayRef<c10::IValue> args) {
  const OpCall call = read_call(op, args);
  TESSERA_CHECK(!op.is_in_place_view, ErrorKind::kShape,
                "[dtensor.dispatch] {}: changing the shape of a DTensor in place is not supported. "
                "Use the out-of-place version.",
                call.describe());
  const Rule* rule = op.rule.load(std::memory_order_acquire);
  TESSERA_CHECK(rule != nullptr, ErrorKind::kShape,
                "[dtensor.dispatch] {}: the operation does not have a sharding rule registered. "
                "Add one with tessera::register_rule, or call it on to_local() or full_tensor().",
                call.describe());
  Proposal proposal;
  (*rule)(call, proposal);
  const bool inferred = proposal.outputs.empty() && returns_new_tensors(op);
  if (inferred) proposal.outputs = infer_outputs(call);
  const PlacementChoice choice = choose(call, proposal, count_outputs(call, proposal.outputs), fixed_outputs(call));
  check_strict(call, proposal, choice);
  check_outs(call, choice, proposal.outputs);
  if (returns_new_tensors(op)) complete_outputs(call, choice, inferred, proposal);
  auto plan = std::make_shared<Plan>();
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    const auto& input = call.inputs[i];
    if (choice.inputs[i] != input.placements) {
      plan->redistributions.push_back({input.arg, input.element,
                                       plan_redistribute(input.sizes, *call.mesh, input.placements, choice.inputs[i]),
                                       make_shared_placements(choice.inputs[i])});
    }
  }
  plan->gathers_view = std::ranges::any_of(plan->redistributions,
                                           [&](const Plan::Redistribution& each) { return each.arg == op.view_of; });
  if (proposal.rewrite) plan->rewrites = proposal.rewrite(call, choice, proposal.outputs);
  plan->outputs = plan_outputs(call, choice, proposal.outputs);
  plan->takes_random_stream = proposal.takes_random_stream;
  plan->cacheable = proposal.cacheable;
  if (proposal.local) {
    plan->local = proposal.local(call, choice);
    if (plan->local && !call.outs.empty()) plan->local = with_copy_to_outs(call, std::move(plan->local));
  }
  return plan;
}

}  // namespace tessera
