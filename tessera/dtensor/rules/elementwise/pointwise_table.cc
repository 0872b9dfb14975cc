// The list of pointwise operations, with the PartialRule of each: which Partial operands give a Partial result.
#include "tessera/dtensor/rules/elementwise/pointwise.h"

namespace tessera {

namespace {

// Whether x <= y implies that converted x <= converted y for all values of type `from`. Only then may a Partial(max) or
// Partial(min) tensor be converted before it is reduced. False from floating point to integers, because a rank's value
// may be infinite and has no integer.
bool keeps_order(at::ScalarType from, at::ScalarType to) {
  if (at::isFloatingType(to)) return true;
  const bool integers = at::isIntegralType(from, /*includeBool=*/true) && at::isIntegralType(to, /*includeBool=*/false);
  return from == to || (integers && (from == at::kBool || c10::elementSize(to) > c10::elementSize(from)));
}

// The rule of _to_copy and of conj. A strategy in which a Partial operand gives a result of the same placement converts
// the dtype before the reduction. It is proposed if the dtype stays the same. If the dtype changes to one other than
// bool, it is proposed for Partial(max) and Partial(min) if the conversion of the dtype keeps the order of values, and
// for other Partial operands if the conversion does not round the ranks' values.
void propose_conversion(const OpCall& call, Proposal& proposal) {
  const int arg = call.arg_named("dtype");
  const auto from = call.inputs[0].tensor->scalar_type();
  const auto to = call.has(arg) ? static_cast<at::ScalarType>(call.int_at(arg)) : from;
  propose_pointwise(call, proposal, PartialRule::kNone);
  for (const Placement& p : partials_among(call)) {
    // Complex numbers cannot be reduced by max, min or product: they have no order, and collectives do not multiply
    // them.
    const bool ordered = !at::isComplexType(to);
    const bool passes =
        is_extreme(p) ? keeps_order(from, to) : !rounds_partials(from, to) && (ordered || is_additive(p));
    if (from == to || (to != at::kBool && passes)) proposal.strategies.push_back(same_placement(call, p));
  }
}

// complex(real, imag): if real and imag are both Partial(sum) or both Partial(avg), so is the result.
void propose_complex(const OpCall& call, Proposal& proposal) {
  propose_pointwise(call, proposal, PartialRule::kNone);
  for (const Placement& p : partials_among(call)) {
    if (is_additive(p)) proposal.strategies.push_back(same_placement(call, p));
  }
}

// threshold(x, t, v) is x if x > t, else v. It is monotonically increasing in x if v <= t.
void propose_threshold(const OpCall& call, Proposal& proposal) {
  const bool increasing = call.args[2].toScalar().toDouble() <= call.args[1].toScalar().toDouble();
  propose_pointwise(call, proposal, increasing ? PartialRule::kIncreasing : PartialRule::kNone);
}

// log_sigmoid_forward(self) -> (output, buffer). The buffer is for the backward; on devices other than the CPU it is
// empty.
void propose_log_sigmoid(const OpCall& call, Proposal& proposal) {
  propose_pointwise(call, proposal, PartialRule::kNone);
  if (!call.inputs[0].tensor->is_cpu()) {
    proposal.outputs[1] = {{0}, {}};
    for (auto& strategy : proposal.strategies) strategy.outputs = {strategy.outputs[0], Replicate()};
  }
}

void add_linear_names(RuleTable& table) {
  table.add({"aten::neg", "aten::negative", "aten::_neg_view", "aten::_neg_view_copy"},
            pointwise(PartialRule::kNegation));
  table.add({"aten::rad2deg", "aten::deg2rad"}, pointwise(PartialRule::kScaling));
  table.add({"aten::add", "aten::sub"}, pointwise(PartialRule::kAdditive));
  table.add({"aten::mul"}, pointwise(PartialRule::kMultiplicative));
  table.add({"aten::div"}, pointwise(PartialRule::kDivision));
  table.add({"aten::div.Tensor_mode", "aten::div_.Tensor_mode", "aten::div.Scalar_mode", "aten::div_.Scalar_mode",
             "aten::div.out_mode", "aten::div.Scalar_mode_out"},
            pointwise(PartialRule::kNone));
  table.add({"aten::detach", "aten::alias", "aten::lift", "aten::lift_fresh", "aten::copy", "aten::zero",
             "aten::lift_fresh_copy", "aten::alias_copy", "aten::detach_copy", "aten::positive"},
            pointwise(PartialRule::kCopy));
  table.add("aten::complex", propose_complex);
  table.add("aten::polar", pointwise(PartialRule::kNone));
  table.add({"aten::_to_copy", "aten::_conj", "aten::_conj_physical", "aten::conj_physical"}, propose_conversion);
}

void add_monotone_names(RuleTable& table) {
  // Increasing functions whose domain is all numbers. They can be applied to each rank's value of a Partial(max) or
  // Partial(min) tensor before the reduction. sqrt and log are not among them: one rank's value may be outside their
  // domain and give NaN, although the maximum over the ranks is in their domain.
  table.add({"aten::asinh", "aten::atan", "aten::ceil", "aten::erf", "aten::exp", "aten::exp2", "aten::expm1",
             "aten::floor", "aten::relu", "aten::round", "aten::sgn", "aten::sigmoid", "aten::sign", "aten::sinh",
             "aten::tanh", "aten::trunc", "aten::hardshrink", "aten::clamp_max", "aten::clamp_min"},
            pointwise(PartialRule::kIncreasing));
  table.add("aten::threshold", propose_threshold);
  table.add("aten::erfc", pointwise(PartialRule::kDecreasing));
  table.add({"aten::logaddexp", "aten::logaddexp2"}, pointwise(PartialRule::kMonotone));
  table.add({"aten::maximum", "aten::max.other", "aten::max.out", "aten::fmax", "aten::clamp_min.Tensor",
             "aten::clamp_min_.Tensor", "aten::clamp_min.Tensor_out"},
            pointwise(PartialRule::kMaximum));
  table.add({"aten::minimum", "aten::min.other", "aten::min.out", "aten::fmin", "aten::clamp_max.Tensor",
             "aten::clamp_max_.Tensor", "aten::clamp_max.Tensor_out"},
            pointwise(PartialRule::kMinimum));
}

void add_other_names(RuleTable& table) {
  table.add("aten::log_sigmoid_forward", propose_log_sigmoid);
  const Rule no_partials = pointwise(PartialRule::kNone);
  // Comparisons and logic.
  table.add({"aten::eq", "aten::ge", "aten::gt", "aten::le", "aten::lt", "aten::ne", "aten::isin.Tensor_Scalar",
             "aten::isinf", "aten::isnan", "aten::isneginf", "aten::isposinf", "aten::signbit", "aten::logical_and",
             "aten::logical_not", "aten::logical_or", "aten::logical_xor", "aten::where"},
            no_partials);
  // Bitwise operations on integers, and bit shifts.
  table.add({"aten::bitwise_and", "aten::bitwise_not", "aten::bitwise_or", "aten::bitwise_xor",
             "aten::bitwise_left_shift", "aten::bitwise_right_shift", "aten::__and__", "aten::__or__", "aten::__xor__",
             "aten::__lshift__", "aten::__rshift__", "aten::__iand__", "aten::__ior__", "aten::__ixor__",
             "aten::__ilshift__", "aten::__irshift__"},
            no_partials);
  // Trigonometric and hyperbolic functions, their inverses, and similar functions.
  table.add({"aten::acos", "aten::acosh", "aten::angle", "aten::asin", "aten::atan2", "aten::atanh", "aten::cos",
             "aten::cosh", "aten::sin", "aten::sinc", "aten::tan", "aten::hypot"},
            no_partials);
  // Powers, roots and logarithms.
  table.add({"aten::float_power", "aten::ldexp", "aten::log", "aten::log10", "aten::log1p", "aten::log2", "aten::logit",
             "aten::pow", "aten::reciprocal", "aten::rsqrt", "aten::sqrt", "aten::square", "aten::xlogy"},
            no_partials);
  // Divisions, remainders and divisors, and operations on the sign, fraction or exponent of a number.
  table.add({"aten::abs", "aten::ceil_divide", "aten::copysign", "aten::floor_divide", "aten::fmod", "aten::frac",
             "aten::frexp", "aten::gcd", "aten::heaviside", "aten::lcm", "aten::nextafter", "aten::remainder"},
            no_partials);
  // Activations.
  table.add({"aten::celu", "aten::elu", "aten::gelu", "aten::glu_jvp", "aten::hardsigmoid", "aten::hardswish",
             "aten::hardtanh", "aten::leaky_relu", "aten::mish", "aten::prelu_kernel", "aten::_prelu_kernel",
             "aten::relu6", "aten::selu", "aten::silu", "aten::softplus", "aten::softshrink"},
            no_partials);
  // Special functions.
  table.add({"aten::digamma", "aten::erfinv", "aten::i0", "aten::igamma", "aten::igammac", "aten::lgamma",
             "aten::mvlgamma", "aten::polygamma"},
            no_partials);
  // Other operations. nan_to_num may replace infinity by a finite number that is smaller than other values, so it does
  // not commute with a maximum.
  table.add({"aten::addcdiv", "aten::addcmul", "aten::clamp", "aten::clone", "aten::contiguous", "aten::lerp",
             "aten::nan_to_num", "aten::rsub"},
            no_partials);
  // fill writes the same value on all ranks. So the result may be Partial with the reductions for which is_idempotent()
  // is true: the average, maximum or minimum of equal values is the value.
  table.add("aten::fill", [](const OpCall& call, Proposal& proposal) {
    propose_pointwise(call, proposal, PartialRule::kNone);
    add_pass_through(call, proposal, 0, is_idempotent);
  });
  // With value 0 masked_fill is linear in self, so a Partial(sum) self gives a Partial(sum) result.
  table.add("aten::masked_fill", [](const OpCall& call, Proposal& proposal) {
    propose_pointwise(call, proposal, PartialRule::kNone);
    const auto& value = call.args[2];
    if (value.isScalar() && value.toScalar().toComplexDouble() == 0.0) add_linear(call, proposal, 0);
  });
  // Backward formulas that are pointwise in the gradient and in the saved tensors.
  table.add({"aten::threshold_backward", "aten::silu_backward", "aten::sigmoid_backward", "aten::tanh_backward",
             "aten::gelu_backward", "aten::leaky_relu_backward", "aten::elu_backward", "aten::hardtanh_backward",
             "aten::hardswish_backward", "aten::hardsigmoid_backward", "aten::softplus_backward", "aten::mish_backward",
             "aten::logit_backward", "aten::softshrink_backward", "aten::hardshrink_backward",
             "aten::_prelu_kernel_backward", "aten::rrelu_with_noise_backward"},
            no_partials);
  table.add("aten::log_sigmoid_backward", [](const OpCall& call, Proposal& proposal) {
    if (call.inputs[2].sizes == call.inputs[1].sizes) {
      propose_pointwise(call, proposal, PartialRule::kNone);
      return;
    }
    for (int64_t dim = 0; dim < call.inputs[0].dim(); ++dim) {  // the buffer is empty
      proposal.strategies.push_back({{Shard(dim)}, {Shard(dim), Shard(dim), Replicate()}});
    }
    proposal.output(call.inputs[1].sizes);
  });
}

}  // namespace

void add_pointwise_rules(RuleTable& table) {
  add_linear_names(table);
  add_monotone_names(table);
  add_other_names(table);
  add_special_function_rules(table);
}

}  // namespace tessera
