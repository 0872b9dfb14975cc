#include "tests/conformance/programs/evaluate.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <set>
#include <sstream>
#include <unordered_map>

#include "tessera/dtensor/redistribute/redistribute.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/kernels/dispatch/operations.h"
#include "tests/conformance/programs/inputs.h"
#include "tests/support/sanitized.h"

namespace tessera::testing {

bool takes_gradients(c10::ScalarType type) { return c10::isFloatingType(type) || c10::isComplexType(type); }

bool has_narrow(const Program& program) {
  const auto narrow = [](const Arg& arg) {
    const auto* type = std::get_if<Arg::Dtype>(&arg.value);
    return type != nullptr && is_narrow(type->type);
  };
  return std::ranges::any_of(program.steps, [&](const Step& step) {
    return (step.kind == Step::Kind::kInput && is_narrow(step.type)) || std::ranges::any_of(step.args, narrow);
  });
}

const c10::OperatorHandle& find_op(const std::string& name) {
  static std::mutex mutex;
  static std::unordered_map<std::string, c10::OperatorHandle> known;
  const std::lock_guard lock(mutex);
  const auto found = known.find(name);
  if (found != known.end()) return found->second;
  const auto dot = name.find('.');
  const bool ours = name.find("::") != std::string::npos;
  if (ours) kernels::ensure_operations();
  const c10::OperatorName parts{(ours ? "" : "aten::") + name.substr(0, dot),
                                dot == std::string::npos ? "" : name.substr(dot + 1)};
  const auto op = c10::Dispatcher::singleton().findSchema(parts);
  if (!op) throw std::runtime_error("program: libtorch has no operation " + name);
  return known.emplace(name, *op).first->second;
}

bool writes(const Step& step) {
  if (step.kind != Step::Kind::kCall) return false;
  const auto& arguments = find_op(step.op).schema().arguments();
  return std::ranges::any_of(arguments, [](const c10::Argument& argument) {
    return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
  });
}

bool may_share(const Step& step) {
  // kron keeps its operands for backward in views that do not count writes.
  static const std::set<std::string> kOps{"reshape",  "flatten.using_ints", "ravel", "detach",
                                          "to.dtype", "contiguous",         "kron"};
  return step.kind == Step::Kind::kRedistribute || (step.kind == Step::Kind::kCall && kOps.count(step.op) > 0);
}

namespace {

using c10::TypeKind;

// Converts arguments to values, by the types of a schema.
class ArgumentReader {
 public:
  ArgumentReader(const Machine& machine, const Results& values, Tensors& tensors)
      : machine_(machine), values_(values), tensors_(tensors) {}

  c10::IValue value(const Arg& arg, const c10::Type& type) const {
    if (type.kind() == TypeKind::OptionalType) {
      return std::holds_alternative<Arg::None>(arg.value)
                 ? c10::IValue()
                 : value(arg, *type.castRaw<c10::OptionalType>()->getElementType());
    }
    if (const auto* list = std::get_if<Arg::List>(&arg.value)) {
      return list_of(*list, *type.castRaw<c10::ListType>()->getElementType());
    }
    if (std::holds_alternative<Arg::None>(arg.value)) return {};
    if (const auto* ref = std::get_if<Arg::Ref>(&arg.value)) return tensor(*ref);
    if (const auto* n = std::get_if<int64_t>(&arg.value)) {
      return type.kind() == TypeKind::FloatType ? c10::IValue(static_cast<double>(*n)) : c10::IValue(*n);
    }
    if (const auto* x = std::get_if<double>(&arg.value)) return *x;
    if (const auto* b = std::get_if<bool>(&arg.value)) return *b;
    if (const auto* text = std::get_if<std::string>(&arg.value)) return *text;
    return static_cast<int64_t>(machine_.type_of(std::get<Arg::Dtype>(arg.value).type));
  }

 private:
  at::Tensor tensor(const Arg::Ref& ref) const {
    const at::Tensor& found = values_.tensors.at(ref.id);
    if (!found.defined()) throw std::runtime_error(fmt::format("program: %{} is used before it is made", ref.id));
    tensors_.push_back(found);
    return found;
  }

  c10::IValue list_of(const Arg::List& list, const c10::Type& element) const {
    const auto kind = element.kind();
    if (kind == TypeKind::TensorType) {
      c10::List<at::Tensor> made;
      for (const auto& arg : list) made.push_back(tensor(std::get<Arg::Ref>(arg.value)));
      return made;
    }
    if (kind == TypeKind::OptionalType) {
      c10::List<std::optional<at::Tensor>> made;
      for (const auto& arg : list) {
        const auto* ref = std::get_if<Arg::Ref>(&arg.value);
        made.push_back(ref != nullptr ? std::optional(tensor(*ref)) : std::nullopt);
      }
      return made;
    }
    if (kind == TypeKind::FloatType) {
      c10::List<double> made;
      for (const auto& arg : list) made.push_back(value(arg, element).toDouble());
      return made;
    }
    if (kind == TypeKind::BoolType) {
      c10::List<bool> made;
      for (const auto& arg : list) made.push_back(std::get<bool>(arg.value));
      return made;
    }
    c10::List<int64_t> made;
    for (const auto& arg : list) made.push_back(std::get<int64_t>(arg.value));
    return made;
  }

  const Machine& machine_;
  const Results& values_;
  Tensors& tensors_;
};

void keep(int id, at::Tensor tensor, Results& values) {
  if (static_cast<size_t>(id) >= values.tensors.size()) values.tensors.resize(id + 1);
  values.tensors[id] = std::move(tensor);
}

}  // namespace

namespace {

// Returns the tensors of an operation's results; the tensors of a list one by one.
Tensors call(Machine& machine, const Step& step, Results& values, Tensors& arguments) {
  const auto& op = find_op(step.op);
  const auto& schema = op.schema().arguments();
  torch::jit::Stack stack;
  const ArgumentReader reader(machine, values, arguments);
  for (size_t i = 0; i < schema.size(); ++i) {
    stack.push_back(i < step.args.size() ? reader.value(step.args[i], *schema[i].type())
                                         : schema[i].default_value().value_or(c10::IValue()));
  }
  machine.before(step, values);
  op.callBoxed(stack);
  Tensors results;
  for (const auto& value : stack) {
    if (value.isTensor()) {
      results.push_back(value.toTensor());
    } else if (value.isTensorList()) {
      for (const auto& element : value.toListRef()) results.push_back(element.toTensor());
    } else {
      values.others.push_back(value);
    }
  }
  return results;
}

}  // namespace

// If a tensor is multiplied by itself in place (x.mul_(x)), libtorch never frees it, because the graph that the tensor
// holds saves the tensor. This is so for plain tensors, too.
void Machine::run(const Step& step, Results& values, uint64_t seed) {
  const LeaksAreNotOurs scope;
  Tensors arguments, results;
  if (step.kind == Step::Kind::kInput) {
    results.push_back(input(step, seed));
  } else if (step.kind == Step::Kind::kRedistribute) {
    arguments.push_back(values.tensors.at(std::get<Arg::Ref>(step.args[0].value).id));
    results.push_back(redistribute(arguments[0], step));
  } else {
    results = call(*this, step, values, arguments);
  }
  if (results.size() != step.results.size()) {
    throw std::runtime_error(fmt::format("program: {} gives {} tensors", to_text(step), results.size()));
  }
  for (size_t i = 0; i < results.size(); ++i) keep(step.results[i], results[i], values);
  after(step, values, arguments);
}

void Machine::run_open(Step& step, Results& values, uint64_t seed) {
  const LeaksAreNotOurs scope;
  if (step.kind != Step::Kind::kCall) {
    run(step, values, seed);
    return;
  }
  Tensors arguments;
  const Tensors results = call(*this, step, values, arguments);
  step.results.clear();
  for (const auto& result : results) {
    step.results.push_back(static_cast<int>(values.tensors.size()));
    values.tensors.push_back(result);
  }
  after(step, values, arguments);
}

at::Tensor MeshMachine::input(const Step& step, uint64_t seed) {
  return lay_out(make_plain(step, seed), mesh_, step.placements).set_requires_grad(step.grad);
}

at::Tensor MeshMachine::redistribute(const at::Tensor& tensor, const Step& step) {
  return tessera::redistribute(tensor, step.placements, {.async_op = step.async});
}

Results run_forward(const Program& program, Machine& machine) {
  Results values;
  values.tensors.resize(program.value_count());
  for (const auto& step : program.steps) machine.run(step, values, program.values);
  return values;
}

namespace {

// Returns multiples of a half in [-1, 1], for every type.
at::Tensor flow_like(const at::Tensor& tensor, uint64_t seed) {
  Step step;
  step.results = {0};
  step.type = tensor.scalar_type();
  step.sizes = tensor.sizes().vec();
  step.fill = {.kind = Fill::Kind::kBelow, .below = 5};
  const at::NoGradGuard no_grad;
  const at::Tensor counted = make_plain(step, seed);
  return (counted.is_complex() ? at::complex(at::real(counted) - 2, at::imag(counted) - 2) : counted - 2) * 0.5;
}

Tensors leaves_of(const Program& program, const Results& values) {
  Tensors leaves;
  for (const auto& step : program.steps) {
    if (step.kind == Step::Kind::kInput && step.grad) leaves.push_back(values.tensors[step.results[0]]);
  }
  return leaves;
}

}  // namespace

Tensors plain_flows(const Program& program, const Results& values) {
  Tensors flows;
  for (const auto& flow : program.flows) {
    flows.push_back(flow_like(values.tensors.at(flow.id), program.values + 1000 + static_cast<uint64_t>(flow.id)));
  }
  return flows;
}

Tensors gradients(const Program& program, const Results& values, const Tensors& flows, bool create_graph) {
  Tensors outputs;
  for (const auto& flow : program.flows) outputs.push_back(values.tensors.at(flow.id));
  return torch::autograd::grad(outputs, leaves_of(program, values), flows, /*retain_graph=*/create_graph, create_graph,
                               /*allow_unused=*/true);
}

Tensors plain_second_flows(const Program& program, const Tensors& first) {
  Tensors flows;
  for (size_t i = 0; i < first.size(); ++i) {
    const bool flowing = first[i].defined() && first[i].requires_grad();
    flows.push_back(flowing ? flow_like(first[i], program.values + 2000 + i) : at::Tensor());
  }
  return flows;
}

Tensors second_gradients(const Program& program, const Results& values, const Tensors& first, const Tensors& flows) {
  Tensors outputs, given;
  for (size_t i = 0; i < first.size(); ++i) {
    if (flows[i].defined()) {
      outputs.push_back(first[i]);
      given.push_back(flows[i]);
    }
  }
  const Tensors leaves = leaves_of(program, values);
  if (outputs.empty()) return Tensors(leaves.size());
  return torch::autograd::grad(outputs, leaves, given, /*retain_graph=*/false, /*create_graph=*/false,
                               /*allow_unused=*/true);
}

bool is_zero(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return !tensor.defined() || !at::any(tensor.detach()).item<bool>();
}

bool depends_in_vain(const Program& program, size_t gradient) {
  PlainMachine machine(Twin::kClean);
  const Results values = run_forward(program, machine);
  const Tensors first = gradients(program, values, plain_flows(program, values), /*create_graph=*/true);
  Tensors flows(first.size());
  flows[gradient] = plain_second_flows(program, first)[gradient];
  const Tensors second = second_gradients(program, values, first, flows);
  return std::ranges::all_of(second, is_zero);
}

namespace {

// Whether the graph of the gradient contains a derivative that autograd does not have.
bool lacks_derivative(const at::Tensor& gradient) {
  std::vector<const torch::autograd::Node*> left = {gradient.defined() ? gradient.grad_fn().get() : nullptr};
  std::set<const torch::autograd::Node*> met = {nullptr};
  while (!left.empty()) {
    const auto* node = left.back();
    left.pop_back();
    if (!met.insert(node).second) continue;
    if (dynamic_cast<const torch::autograd::NotImplemented*>(node) != nullptr) return true;
    for (const auto& edge : node->next_edges()) left.push_back(edge.function.get());
  }
  return false;
}

// After a write through a view autograd uses as_strided. The backward of as_strided without elements gives zeros that
// depend on no tensor. A DTensor calls the views themselves and reaches derivatives that plain tensors never reach.
void refuse_cut_graphs(const Program& program, const Plain& plain) {
  Tensors flowing;
  for (const auto& flow : program.flows) flowing.push_back(plain.values.tensors.at(flow.id));
  for (const auto& tensor : plain.values.tensors) {
    const bool cut = tensor.defined() && tensor.numel() == 0 && tensor.grad_fn() != nullptr &&
                     tensor.grad_fn()->name() == "AsStridedBackward0";
    if (cut && lacks_derivative(torch::autograd::grad(flowing, {tensor}, plain.flows, /*retain_graph=*/true,
                                                      /*create_graph=*/true, /*allow_unused=*/true)[0])) {
      throw std::runtime_error("a second derivative that as_strided of no elements cuts off");
    }
  }
}

}  // namespace

Plain run_plain(const Program& program, Twin twin) {
  PlainMachine machine(twin);
  Plain plain;
  plain.values = run_forward(program, machine);
  if (program.flows.empty()) return plain;
  plain.flows = plain_flows(program, plain.values);
  if (program.twice) refuse_cut_graphs(program, plain);
  plain.gradients.first = gradients(program, plain.values, plain.flows, program.twice);
  if (program.twice) {
    plain.gradients.second_flows = plain_second_flows(program, plain.gradients.first);
    plain.gradients.second =
        second_gradients(program, plain.values, plain.gradients.first, plain.gradients.second_flows);
  }
  return plain;
}

namespace {

bool near(double a, double b, double tolerance) {
  return a == b || (std::isnan(a) && std::isnan(b)) || std::abs(a - b) <= tolerance * (1 + std::abs(b));
}

std::string text_of(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor;
  return text.str().substr(0, 1200);
}

}  // namespace

std::string text_of(const std::exception& error) {
  const auto* known = dynamic_cast<const c10::Error*>(&error);
  return known != nullptr ? known->what_without_backtrace() : error.what();
}

std::string difference(const at::Tensor& found, const at::Tensor& wanted, double tolerance) {
  const at::NoGradGuard no_grad;
  if (found.sizes() != wanted.sizes()) {
    return fmt::format("shape [{}], wanted [{}]", fmt::join(found.sizes(), ", "), fmt::join(wanted.sizes(), ", "));
  }
  if (found.scalar_type() != wanted.scalar_type()) {
    return fmt::format("type {}, wanted {}", short_name(found.scalar_type()), short_name(wanted.scalar_type()));
  }
  const auto plain = [](const at::Tensor& tensor) {
    at::Tensor data = tensor.detach().resolve_conj().resolve_neg();
    data = data.is_complex() ? at::view_as_real(data) : data;
    return data.cpu().to(at::kDouble).contiguous();
  };
  const at::Tensor a = plain(found);
  const at::Tensor b = plain(wanted);
  const auto* first = a.const_data_ptr<double>();
  const auto* second = b.const_data_ptr<double>();
  for (int64_t i = 0; i < a.numel(); ++i) {
    if (!near(first[i], second[i], tolerance)) {
      return fmt::format("found {}\nwanted {}", text_of(found), text_of(wanted));
    }
  }
  return {};
}

}  // namespace tessera::testing
