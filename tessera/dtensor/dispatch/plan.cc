#include "tessera/dtensor/dispatch/plan.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/graph_task.h>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera::detail {

namespace {

uint64_t next_op_id() {
  static std::atomic<uint64_t> counter{0};
  return ++counter;
}

bool holds_tensors(const c10::Type& type) {
  if (type.kind() == c10::TypeKind::TensorType) {
    return true;
  }
  if (type.kind() == c10::TypeKind::ListType || type.kind() == c10::TypeKind::OptionalType) {
    return holds_tensors(*type.containedType(0));
  }
  return false;
}

}  // namespace

OpEntry::OpEntry(const c10::OperatorHandle& op) : handle(op), name(toString(op.operator_name())), id(next_op_id()) {
  const auto& schema = op.schema();
  for (const auto& argument : schema.arguments()) {
    ArgInfo info{argument.name(), holds_tensors(*argument.type()),
                 argument.alias_info() != nullptr && argument.alias_info()->isWrite(), argument.is_out()};
    if (info.tensors) {
      tensor_args.push_back(static_cast<int>(args.size()));
      mutates = mutates || info.mutated;
    }
    args.push_back(std::move(info));
  }
  for (const auto& returned : schema.returns()) {
    int alias = -1;
    const auto* viewed = returned.alias_info();
    for (const int arg : tensor_args) {
      const auto* info = schema.arguments()[arg].alias_info();
      if (viewed != nullptr && !viewed->isWrite() && info != nullptr && !info->isWrite()) {
        view_of = arg;
      }
    }
    if (returned.alias_info() != nullptr && returned.alias_info()->isWrite()) {
      for (size_t i = 0; i < args.size(); ++i) {
        const auto* info = schema.arguments()[i].alias_info();
        if (info != nullptr && info->beforeSets() == returned.alias_info()->beforeSets()) {
          alias = static_cast<int>(i);
        }
      }
    }
    return_alias.push_back(alias);
  }
  // Their schemas do not say that training moves the statistics.
  if (name.starts_with("aten::native_batch_norm") || name.starts_with("aten::cudnn_batch_norm") ||
      name.starts_with("aten::miopen_batch_norm")) {
    written_if = -1;
    for (size_t i = 0; i < args.size() && name.find("backward") == std::string::npos; ++i) {
      written_if = args[i].name == "training" ? static_cast<int>(i) : written_if;
      args[i].mutated = args[i].mutated || args[i].name.starts_with("running_");
      mutates = mutates || args[i].mutated;
    }
  }
  in_place_view = op.hasTag(at::Tag::inplace_view);
  foreach
    = name.find("::_foreach_") != std::string::npos;
}

}  // namespace tessera::detail

namespace tessera {

using namespace detail;

const std::string& OpCall::name() const { return op.name; }

int OpCall::input_at(int arg) const {
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].arg == arg) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

int OpCall::arg_named(const char* argument) const {
  for (size_t i = 0; i < op.args.size(); ++i) {
    if (op.args[i].name == argument) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

std::vector<int64_t> OpCall::ints_at(int arg) const {
  if (!has(arg)) {
    return {};
  }
  return args[arg].isInt() ? std::vector<int64_t>{args[arg].toInt()} : args[arg].toIntVector();
}

std::string OpCall::describe() const {
  std::string text = op.name + "(";
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto& input = inputs[i];
    text += fmt::format("{}{}{}: [{}] {}", i == 0 ? "" : ", ", op.args[input.arg].name,
                        input.element < 0 ? "" : fmt::format("[{}]", input.element), fmt::join(input.sizes, ", "),
                        to_string(input.placements));
    if (i == 7 && inputs.size() > 9) {
      text += fmt::format(", and {} more", inputs.size() - 8);
      break;
    }
  }
  return text + ")";
}

namespace detail {

namespace {

class CallReader {
 public:
  CallReader(const OpEntry& op, c10::ArrayRef<c10::IValue> args) : op_(op), args_(args) {
    for_each([&](int, int, const at::Tensor& tensor) {
      if (is_dtensor(tensor)) {
        take_mesh(tensor);
      }
    });
    for_each([&](int arg, int element, const at::Tensor& tensor) { add(arg, element, tensor); });
  }

  OpCall call() { return OpCall(op_, args_, mesh_, std::move(inputs_), std::move(outs_)); }

 private:
  template <class Visit>
  void for_each(Visit visit) {
    for (const int arg : op_.tensor_args) {
      if (args_[arg].isTensor()) {
        if (args_[arg].toTensor().defined()) {
          visit(arg, -1, args_[arg].toTensor());
        }
      } else if (args_[arg].isList()) {
        int element = 0;
        for (const auto& value : args_[arg].toListRef()) {
          if (value.isTensor() && value.toTensor().defined()) {
            visit(arg, element, value.toTensor());
          }
          ++element;
        }
      }
    }
  }

  void take_mesh(const at::Tensor& tensor) {
    const MeshPtr& mesh = impl_of(tensor)->mesh();
    TESSERA_CHECK(!mesh_ || *mesh_ == *mesh, ErrorKind::kShape,
                  "[dtensor.dispatch] Cannot run {} on inputs with different meshes: got {} and {}. "
                  "Bring them to one mesh through full_tensor and distribute_tensor.",
                  op_.name, mesh_->to_string(), mesh->to_string());
    mesh_ = mesh;
  }

  void add(int arg, int element, const at::Tensor& tensor) {
    const bool written = op_.args[arg].mutated && (op_.written_if < 0 || args_[op_.written_if].toBool());
    TensorInput input{arg, element, &tensor, {}, tensor.sizes(), written};
    if (is_dtensor(tensor)) {
      input.placements = impl_of(tensor)->placements();
    } else {
      check_plain(arg, element, tensor);
      input.placements.assign(mesh_->ndim(), Replicate());
    }
    (op_.args[arg].out ? outs_ : inputs_).push_back(std::move(input));
  }

  // A plain tensor counts as replicated only where that cannot be wrong.
  void check_plain(int arg, int element, const at::Tensor& tensor) const {
    const bool may =
        !op_.args[arg].mutated && (tensor.numel() == 1 || implicit_replication_enabled() || is_engine_zero(tensor));
    TESSERA_CHECK(
        may, ErrorKind::kShape,
        "[dtensor.dispatch] {} got mixed torch.Tensor and DTensor: argument '{}'{} is a plain tensor of shape [{}], "
        "need to convert all torch.Tensor to DTensor before calling distributed operators! "
        "Wrap it with distribute_tensor or from_local, or hold an ImplicitReplication where it is alike on all ranks.",
        op_.name, op_.args[arg].name, element < 0 ? "" : fmt::format("[{}]", element), fmt::join(tensor.sizes(), ", "));
  }

  // The autograd engine writes plain zeros for gradients that nobody gave. A gradient of the user's may be zero on some
  // ranks only: all agree. COLLECTIVE over the mesh.
  bool is_engine_zero(const at::Tensor& tensor) const {
    if (torch::autograd::get_current_graph_task_id() == -1 || tensor.is_meta()) {
      return false;
    }
    const at::Tensor zero = at::any(tensor).logical_not().to(at::kByte).reshape({1});
    for (int64_t m = 0; m < mesh_->ndim() && mesh_->coordinate(); ++m) {
      if (mesh_->shape()[m] > 1) {
        comm::all_reduce(*mesh_->group(m), zero, ReduceOp::kMin, op_.name).wait();
      }
    }
    return zero.item<uint8_t>() != 0;
  }

  const OpEntry& op_;
  c10::ArrayRef<c10::IValue> args_;
  MeshPtr mesh_;
  std::vector<TensorInput> inputs_;
  std::vector<TensorInput> outs_;
};

// An argument on the meta device. moved: whether the tensor at a place in a list is contiguous first.
using IsMoved = std::function<bool(int element)>;

at::Tensor to_meta(const at::Tensor& tensor, bool moved) {
  const auto options = tensor.options().device(at::kMeta);
  at::Tensor meta =
      moved ? at::empty(tensor.sizes(), options) : at::empty_strided(tensor.sizes(), tensor.strides(), options);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return meta;
}

c10::IValue to_meta(const c10::IValue& value, const IsMoved& moved) {
  int position = 0;
  if (value.isTensor()) {
    return value.toTensor().defined() ? to_meta(value.toTensor(), moved(-1)) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const auto& element : value.toListRef()) {
      list.push_back(to_meta(element.toTensor(), moved(position++)));
    }
    return list;
  }
  if (value.isDevice()) {
    return c10::Device(at::kMeta);
  }
  if (value.isList() && value.type()->containedType(0)->kind() == c10::TypeKind::OptionalType) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& element : value.toListRef()) {
      const bool contiguous = moved(position++);
      list.push_back(element.isTensor() && element.toTensor().defined()
                         ? std::optional<at::Tensor>(to_meta(element.toTensor(), contiguous))
                         : std::nullopt);
    }
    return list;
  }
  return value;
}

size_t count_outputs(const OpCall& call, const std::vector<OutputShape>& shapes) {
  size_t tensors = 0;
  for (const auto& returned : call.op.handle.schema().returns()) {
    tensors += returned.type()->kind() == c10::TypeKind::TensorType;
  }
  return std::max(tensors, shapes.size());
}

bool returns_new_tensors(const OpEntry& op) {
  const auto& returns = op.handle.schema().returns();
  for (size_t i = 0; i < returns.size(); ++i) {
    if (op.return_alias[i] < 0 && holds_tensors(*returns[i].type())) {
      return true;
    }
  }
  return false;
}

// In-place and out= forms: the returned tensors that are arguments keep the placements those have.
FixedOutputs fixed_outputs(const OpCall& call) {
  FixedOutputs fixed;
  for (size_t i = 0; i < call.op.return_alias.size(); ++i) {
    const int arg = call.op.return_alias[i];
    if (arg < 0) {
      continue;
    }
    for (const auto* list : {&call.inputs, &call.outs}) {
      for (const auto& input : *list) {
        if (input.arg == arg) {
          fixed.emplace_back(i, input.placements);
        }
      }
    }
  }
  return fixed;
}

void check_strict(const OpCall& call, const Proposal& proposal, const Choice& choice) {
  for (size_t i = 0; i < choice.inputs.size(); ++i) {
    TESSERA_CHECK(
        !proposal.strict || choice.inputs[i] == call.inputs[i].placements, ErrorKind::kShape,
        "Sharding dimension mismatch: [dtensor.dispatch] {}: {} It cannot be performed without redistribution, "
        "which is disallowed by the "
        "current operator. Please redistribute the tensor to {} before this operation.",
        call.describe(), proposal.strict_reason, to_string(choice.inputs[i]));
  }
}

void check_outs(const OpCall& call, const Choice& choice, const std::vector<OutputShape>& shapes) {
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

// A local function gives new tensors; those of an out= call belong in the caller's.
LocalFunction into_outs(const OpCall& call, LocalFunction local) {
  c10::SmallVector<int, 4> positions;
  for (const auto& out : call.outs) {
    positions.push_back(out.arg);
  }
  return [positions, local = std::move(local)](const LocalCall& of) {
    c10::SmallVector<at::Tensor, 4> outs;
    for (const int position : positions) {
      outs.push_back(of.arg(position).toTensor());
    }
    local(of);
    const size_t base = of.stack.size() - outs.size();
    for (size_t i = 0; i < outs.size(); ++i) {
      if (!of.stack[base + i].toTensor().is_same(outs[i])) {
        outs[i].copy_(of.stack[base + i].toTensor());
      }
    }
  };
}

std::vector<bool> moved_inputs(const OpCall& call, const Choice& choice) {
  std::vector<bool> moved;
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    moved.push_back(choice.inputs[i] != call.inputs[i].placements);
  }
  return moved;
}

bool all_contiguous(const OpCall& call) {
  return std::all_of(call.inputs.begin(), call.inputs.end(),
                     [](const TensorInput& input) { return input.tensor->is_contiguous(); });
}

// Fills in strides and dtypes that the rule leaves open, from the operation on meta tensors. inferred: `shapes` come
// from there already, of the inputs as they lie.
void complete(const OpCall& call, const Choice& choice, bool inferred, std::vector<OutputShape>& shapes) {
  const std::vector<bool> moved = moved_inputs(call, choice);
  const bool contiguous = all_contiguous(call);
  const bool strides_are_open = inferred ? std::find(moved.begin(), moved.end(), true) != moved.end()
                                         : std::any_of(shapes.begin(), shapes.end(),
                                                       [](const OutputShape& shape) { return shape.strides.empty(); });
  const bool outside = !call.mesh->coordinate();
  const bool wanted = (!contiguous && strides_are_open) || (outside && !inferred);
  if (!wanted || !call.op.handle.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) {
    return;
  }
  std::vector<OutputShape> found;
  try {
    found = infer_outputs(call, moved);
  } catch (const std::exception&) {
    return;  // the kernel for meta tensors gives up: contiguous
  }
  for (size_t i = 0; i < shapes.size() && i < found.size(); ++i) {
    if (shapes[i].sizes == found[i].sizes) {
      if (!contiguous && (inferred || shapes[i].strides.empty())) {
        shapes[i].strides = std::move(found[i].strides);
      }
      shapes[i].dtype = shapes[i].dtype ? shapes[i].dtype : found[i].dtype;
    }
  }
}

TensorSpec spec_of(const OpCall& call, const Placements& placements, const OutputShape& shape) {
  TensorSpec spec{share(placements), Sizes(shape.sizes.begin(), shape.sizes.end()), {}, call.op.view_of >= 0, {}};
  const Sizes strides(shape.strides.begin(), shape.strides.end());
  if (!strides.empty() && !lies_as(spec.sizes, strides, dense_strides(spec.sizes))) {
    spec.strides = strides;
    spec.local_strides = strides_in_order(local_sizes(spec.sizes, *call.mesh, placements), strides);
  }
  spec.dtype = shape.dtype.value_or(call.inputs.empty() ? at::kFloat : call.inputs[0].tensor->scalar_type());
  return spec;
}

std::vector<OutputPlan> plan_outputs(const OpCall& call, const Choice& choice, const std::vector<OutputShape>& shapes) {
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
      while (next < shapes.size()) {
        output.tensors.push_back(spec());
      }
    }
  }
  return outputs;
}

}  // namespace

std::vector<OutputShape> infer_outputs(const OpCall& call, const std::vector<bool>& moved) {
  Stack stack;
  for (size_t arg = 0; arg < call.args.size(); ++arg) {
    stack.push_back(to_meta(call.args[arg], [&](int element) {
      for (size_t i = 0; i < moved.size(); ++i) {
        if (call.inputs[i].arg == static_cast<int>(arg) && call.inputs[i].element == element) {
          return static_cast<bool>(moved[i]);
        }
      }
      return false;
    }));
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
      if (view || !tensor.is_contiguous()) {
        shape.strides = tensor.strides().vec();
      }
    }
    shapes.push_back(std::move(shape));
  };
  for (size_t i = 0; i < stack.size(); ++i) {
    const bool view = returns[i].alias_info() != nullptr;
    if (stack[i].isTensor()) {
      add(stack[i].toTensor(), view);
    } else if (stack[i].isTensorList()) {
      for (const auto& element : stack[i].toListRef()) {
        add(element.toTensor(), view);
      }
    }
  }
  return shapes;
}

std::shared_ptr<const Plan> make_plan(const OpEntry& op, c10::ArrayRef<c10::IValue> args) {
  CallReader reader(op, args);
  const OpCall call = reader.call();
  TESSERA_CHECK(!op.in_place_view, ErrorKind::kShape,
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
  if (inferred) {
    proposal.outputs = infer_outputs(call);
  }
  const Choice choice = choose(call, proposal, count_outputs(call, proposal.outputs), fixed_outputs(call));
  check_strict(call, proposal, choice);
  check_outs(call, choice, proposal.outputs);
  if (returns_new_tensors(op)) {
    complete(call, choice, inferred, proposal.outputs);
  }
  auto plan = std::make_shared<Plan>();
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    const auto& input = call.inputs[i];
    if (choice.inputs[i] != input.placements) {
      plan->redistributions.push_back({input.arg, input.element,
                                       plan_redistribute(input.sizes, *call.mesh, input.placements, choice.inputs[i]),
                                       share(choice.inputs[i])});
    }
  }
  plan->copies_view = std::any_of(plan->redistributions.begin(), plan->redistributions.end(),
                                  [&](const Plan::Redistribution& each) { return each.arg == op.view_of; });
  if (proposal.rewrite) {
    plan->rewrites = proposal.rewrite(call, choice, proposal.outputs);
  }
  plan->outputs = plan_outputs(call, choice, proposal.outputs);
  plan->random = proposal.random;
  plan->cacheable = proposal.cacheable;
  if (proposal.local) {
    plan->local = proposal.local(call, choice);
    if (plan->local && !call.outs.empty()) {
      plan->local = into_outs(call, std::move(plan->local));
    }
  }
  return plan;
}

}  // namespace detail

}  // namespace tessera
