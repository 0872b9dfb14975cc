#include "tests/conformance/reference.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <stdexcept>

#include "tessera/comm/rendezvous/world.h"
#include "tessera/dtensor/random/random.h"
#include "tests/conformance/refusal_text.h"

namespace tessera::testing {

Outcome call(const Sample& sample, const std::vector<Slot>& slots, const std::vector<c10::IValue>& args) {
  torch::jit::Stack stack(args.begin(), args.end());
  sample.op.callBoxed(stack);
  Outcome outcome;
  for (const auto& value : stack) {
    if (value.isTensor()) {
      outcome.tensors.push_back(value.toTensor());
    } else if (value.isTensorList()) {
      for (const auto& element : value.toListRef()) outcome.tensors.push_back(element.toTensor());
    } else {
      outcome.others.push_back(value);
    }
  }
  for (const auto& slot : slots) {
    if (slot.mutated) {
      const auto& value = args[slot.arg];
      outcome.tensors.push_back(value.isTensor() ? value.toTensor() : value.toListRef()[slot.element].toTensor());
    }
  }
  return outcome;
}

bool takes_gradient(const at::Tensor& tensor) { return tensor.is_floating_point() || tensor.is_complex(); }

bool Reference::is_leaf(const Slot& slot) const {
  const auto& name = sample.op.schema().arguments()[slot.arg].name();
  return takes_gradient(slot.plain) && !slot.whole && std::ranges::find(constants, name) == constants.end();
}

bool Reference::may_refuse(const std::string& error) const {
  return writes || is_out || sample.may_refuse ? is_refusal_to_write(error) : is_view && is_refusal(error, kViewTexts);
}

Tensors writable(const std::vector<Slot>& slots, const Tensors& leaves) {
  Tensors all = leaves;
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i].mutated) all[i] = leaves[i].clone();
  }
  return all;
}

Tensors gradients_of(const Outcome& outcome, const Tensors& leaves, const Tensors& flows) {
  std::vector<at::Tensor> outputs, grad_outputs, inputs;
  for (size_t i = 0; i < outcome.tensors.size(); ++i) {
    const auto& tensor = outcome.tensors[i];
    if (tensor.defined() && tensor.requires_grad() && flows[i].defined()) {
      outputs.push_back(tensor);
      grad_outputs.push_back(flows[i]);
    }
  }
  for (const auto& leaf : leaves) {
    if (leaf.requires_grad()) inputs.push_back(leaf);
  }
  if (outputs.empty() || inputs.empty()) return {};
  const auto given =
      torch::autograd::grad(outputs, inputs, grad_outputs, /*retain_graph=*/false, /*create_graph=*/false,
                            /*allow_unused=*/true);
  Tensors all;
  size_t next = 0;
  for (const auto& leaf : leaves) all.push_back(leaf.requires_grad() ? given[next++] : at::Tensor());
  return all;
}

namespace {

// Converts the arguments of an out= form to arguments of the form without out=, which may have more arguments with
// defaults. Returns none if they do not fit.
std::optional<std::vector<c10::IValue>> functional_args(const c10::FunctionSchema& functional,
                                                        const c10::FunctionSchema& schema,
                                                        const std::vector<c10::IValue>& args) {
  std::vector<c10::IValue> found;
  size_t used = 0;
  for (const auto& argument : functional.arguments()) {
    const auto at = schema.argumentIndexWithName(argument.name());
    if (at && !schema.arguments()[*at].is_out() && *schema.arguments()[*at].type() == *argument.type()) {
      found.push_back(args[*at]);
      ++used;
    } else if (argument.default_value()) {
      found.push_back(*argument.default_value());
    } else {
      return std::nullopt;
    }
  }
  const auto given = std::ranges::count_if(schema.arguments(), [](const auto& one) { return !one.is_out(); });
  return used == static_cast<size_t>(given) ? std::optional(found) : std::nullopt;
}

// Returns the sample for the overload without out=.
std::optional<Sample> functional_of(const Sample& sample) {
  const auto& schema = sample.op.schema();
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name != schema.name() && name.name != schema.name() + "_functional") continue;
    const auto op = dispatcher.findSchema(name);
    const auto args = op ? functional_args(op->schema(), schema, sample.args) : std::nullopt;
    if (args) return Sample{.op = *op, .label = sample.label, .args = *args, .whole = sample.whole};
  }
  return std::nullopt;
}

void make_outs(Reference& reference) {
  auto& args = reference.sample.args;
  const auto& arguments = reference.sample.op.schema().arguments();
  reference.functional = functional_of(reference.sample);
  if (!reference.functional) {
    throw std::runtime_error(reference.sample.label + ": no overload without out: give out in the sample");
  }
  const auto slots = slots_of(*reference.functional);
  Tensors plain;
  for (const auto& slot : slots) plain.push_back(slot.plain);
  const Outcome outcome =
      call(*reference.functional, {}, with_tensors(*reference.functional, slots, writable(slots, plain)));
  size_t next = 0;
  for (size_t i = 0; i < args.size(); ++i) {
    if (arguments[i].is_out()) args[i] = at::zeros_like(outcome.tensors.at(next++));
  }
}

void classify(Reference& reference) {
  const auto& schema = reference.sample.op.schema();
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& argument = schema.arguments()[i];
    const bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    if (argument.is_out() && reference.sample.args[i].isNone()) {
      reference.is_out = true;
    } else {
      reference.writes = reference.writes || written;
    }
  }
  reference.is_view = schema.name() == "aten::_unsafe_view";
  for (const auto& returned : schema.returns()) {
    reference.is_view = reference.is_view || (returned.alias_info() != nullptr && !returned.alias_info()->isWrite());
  }
}

// Returns the argument for which an operation has no derivative, by the text of an error. Empty for any other error.
std::string constant_in(const std::string& text) {
  for (const std::string before : {"is not differentiable with respect to argument '", "the derivative for '"}) {
    const size_t begin = text.find(before);
    if (begin != std::string::npos) {
      const size_t from = begin + before.size();
      const std::string quoted = text.substr(from, text.find('\'', from) - from);
      return quoted.substr(quoted.find_last_of(' ') + 1);  // "OPERATION ARGUMENT"
    }
  }
  return "";
}

void add_gradients(Reference& reference) {
  Tensors leaves;
  for (const auto& slot : reference.slots) {
    leaves.push_back(slot.plain.detach().clone());
    leaves.back().set_requires_grad(reference.is_leaf(slot));
  }
  reference.flows.clear();
  try {
    const Outcome outcome = call(reference.sample, reference.slots,
                                 with_tensors(reference.sample, reference.slots, writable(reference.slots, leaves)));
    auto generator = at::detail::createCPUGenerator(7);
    for (const auto& tensor : outcome.tensors) {
      const bool flows = reference.flows.size() < reference.sample.flowing;
      reference.flows.push_back(flows && tensor.defined() && takes_gradient(tensor)
                                    ? at::randn(tensor.sizes(), generator, tensor.options().requires_grad(false))
                                    : at::Tensor());
    }
    reference.gradients = gradients_of(outcome, leaves, reference.flows);
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    reference.gradients.clear();
    const std::string constant = constant_in(text);
    const auto& known = reference.constants;
    if (!constant.empty() && std::ranges::find(known, constant) == known.end()) {
      reference.constants.push_back(constant);
      return add_gradients(reference);
    }
    reference.no_backward = text.substr(0, text.find('\n'));
  }
}

}  // namespace

std::vector<at::Tensor> outs_like(const Reference& reference, const std::vector<Slot>& slots, const Tensors& tensors) {
  const auto args = with_tensors(reference.sample, slots, writable(slots, tensors));
  const auto others = functional_args(reference.functional->op.schema(), reference.sample.op.schema(), args);
  std::vector<at::Tensor> outs;
  for (const auto& result : call(*reference.functional, {}, *others).tensors) {
    outs.push_back(from_local(at::zeros_like(to_local(result)), device_mesh(result), placements(result),
                              {.shape = result.sizes().vec(), .stride = result.strides().vec()}));
  }
  return outs;
}

namespace {

// The reference for a random operation is the draw on a mesh of one rank, not the draw of the plain operation.
void draw_alone(Reference& reference) {
  const auto mesh = init_device_mesh(comm::World::single(), "cpu", {1});
  Tensors placed;
  for (const auto& slot : reference.slots) {
    placed.push_back(distribute_tensor(slot.plain.clone(), mesh, {Replicate()}, std::nullopt));
  }
  manual_seed(kDrawSeed, mesh);
  const Outcome drawn =
      call(reference.sample, reference.slots, with_tensors(reference.sample, reference.slots, placed));
  for (size_t i = 0; i < reference.outcome.tensors.size(); ++i) {
    at::Tensor& plain = reference.outcome.tensors[i];
    const at::Tensor whole = full_tensor(drawn.tensors.at(i));
    if (whole.sizes() != plain.sizes() || whole.scalar_type() != plain.scalar_type()) {
      throw std::runtime_error(reference.sample.label + ": on one rank it gives another shape or type");
    }
    plain = whole;
  }
}

}  // namespace

Reference make_reference(const Sample& sample) {
  Reference reference{.sample = sample};
  classify(reference);
  if (reference.is_out) make_outs(reference);
  const at::NoGradGuard no_grad;
  reference.slots = slots_of(reference.sample);
  Tensors plain;
  for (const auto& slot : reference.slots) plain.push_back(slot.plain);
  if (sample.plan_only) return reference;
  reference.outcome = call(reference.sample, reference.slots,
                           with_tensors(reference.sample, reference.slots, writable(reference.slots, plain)));
  if (sample.random) draw_alone(reference);
  if (sample.gradient && !sample.random && !reference.is_out) {
    const at::AutoGradMode grad(true);
    add_gradients(reference);
  }
  return reference;
}

}  // namespace tessera::testing
