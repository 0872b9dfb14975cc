// Operations that compute each element from the elements at the same place of their operands, with broadcasting.
#include "tessera/dtensor/rules/table.h"

namespace tessera::detail {

namespace {

// Which partial operands give a partial result.
enum class Linearity {
  kNone,
  kUnary,           // f(a + b) = f(a) + f(b)
  kAdditive,        // of two tensors
  kMultiplicative,  // linear in each of two tensors
  kDivision,        // linear in the first of two
  kCopy,            // values pass unchanged: any reduction
  kIncreasing,      // commutes with max and min
  kDecreasing,      // swaps them
  kMaximum,
  kMinimum,
};

bool is_additive(const Placement& p) { return p.is_partial(ReduceOp::kSum) || p.is_partial(ReduceOp::kAvg); }

Placement swapped(const Placement& p) {
  return p.reduce_op == ReduceOp::kMax ? Partial(ReduceOp::kMin) : Partial(ReduceOp::kMax);
}

void add_partial_strategies(const OpCall& call, Linearity linearity, std::vector<Strategy>& strategies) {
  const size_t count = call.inputs.size();
  for (const Placement& p : partials_among(call)) {
    const bool extreme = p.is_partial(ReduceOp::kMax) || p.is_partial(ReduceOp::kMin);
    const Strategy same{{p}, c10::SmallVector<Placement, 4>(count, p)};
    switch (linearity) {
      case Linearity::kNone:
        break;
      case Linearity::kUnary:
        if (count == 1 && is_additive(p)) {
          strategies.push_back(same);
        }
        break;
      case Linearity::kAdditive:
        if (count == 2 && is_additive(p)) {
          strategies.push_back(same);
        } else if (count == 2 && extreme) {
          strategies.push_back({{p}, {p, Replicate()}});
        }
        break;
      case Linearity::kMultiplicative:
        if (count == 1 && is_additive(p)) {
          strategies.push_back(same);
        } else if (count == 2 && is_additive(p)) {
          strategies.push_back({{p}, {p, Replicate()}});
          strategies.push_back({{p}, {Replicate(), p}});
        }
        break;
      case Linearity::kDivision:
        if (count == 1 && is_additive(p)) {
          strategies.push_back(same);
        } else if (count == 2 && is_additive(p)) {
          strategies.push_back({{p}, {p, Replicate()}});
        }
        break;
      case Linearity::kCopy:
        strategies.push_back(same);
        break;
      case Linearity::kIncreasing:
        if (count == 1 && extreme) {
          strategies.push_back(same);
        }
        break;
      case Linearity::kDecreasing:
        if (count == 1 && extreme) {
          strategies.push_back({{swapped(p)}, {p}});
        }
        break;
      case Linearity::kMaximum:
      case Linearity::kMinimum:
        if (p.is_partial(linearity == Linearity::kMaximum ? ReduceOp::kMax : ReduceOp::kMin)) {
          strategies.push_back(same);
        }
        break;
    }
  }
}

void propose(const OpCall& call, Proposal& proposal, Linearity linearity) {
  const Sizes sizes = broadcast_sizes(call);
  const auto ndim = static_cast<int64_t>(sizes.size());
  for (int64_t dim = 0; dim < ndim; ++dim) {
    Strategy strategy{{Shard(dim)}, {}};
    bool wanted = false;
    for (const auto& input : call.inputs) {
      const int64_t own = dim - (ndim - input.dim());
      const bool whole = own < 0 || (input.sizes[own] == 1 && sizes[dim] != 1);
      strategy.inputs.push_back(whole ? Replicate() : Shard(own));
      wanted = wanted || (!whole && is_sharded_on(input, own));
    }
    if (wanted) {
      proposal.strategies.push_back(std::move(strategy));
    }
  }
  add_partial_strategies(call, linearity, proposal.strategies);
  proposal.output(sizes);
}

Rule pointwise(Linearity linearity) {
  return [linearity](const OpCall& call, Proposal& proposal) { propose(call, proposal, linearity); };
}

// _to_copy and its like keep partials between floating types only.
void propose_conversion(const OpCall& call, Proposal& proposal) {
  const int arg = call.arg_named("dtype");
  const auto from = call.inputs[0].tensor->scalar_type();
  const auto to = call.has(arg) ? static_cast<at::ScalarType>(call.int_at(arg)) : from;
  const bool floating = from == to || (at::isFloatingType(from) && at::isFloatingType(to));
  propose(call, proposal, floating ? Linearity::kCopy : Linearity::kNone);
}

}  // namespace

void add_pointwise_rules(RuleTable& table) {
  table.add({"aten::neg", "aten::negative", "aten::positive", "aten::rad2deg", "aten::deg2rad"}, pointwise(Linearity::kUnary));
  table.add({"aten::add", "aten::sub"}, pointwise(Linearity::kAdditive));
  table.add({"aten::mul"}, pointwise(Linearity::kMultiplicative));
  table.add({"aten::div"}, pointwise(Linearity::kDivision));
  table.add({"aten::div.Tensor_mode", "aten::div_.Tensor_mode", "aten::div.Scalar_mode", "aten::div_.Scalar_mode",
             "aten::div.out_mode"}, pointwise(Linearity::kNone));
  table.add({"aten::exp", "aten::expm1", "aten::log", "aten::log2", "aten::log10", "aten::log1p", "aten::sqrt",
             "aten::tanh", "aten::sigmoid", "aten::relu", "aten::floor", "aten::ceil", "aten::round", "aten::trunc",
             "aten::sign", "aten::atan", "aten::erf", "aten::elu", "aten::hardtanh", "aten::relu6", "aten::softplus",
             "aten::log_sigmoid_forward"}, pointwise(Linearity::kIncreasing));
  table.add({"aten::maximum", "aten::max.other", "aten::fmax"}, pointwise(Linearity::kMaximum));
  table.add({"aten::minimum", "aten::min.other", "aten::fmin"}, pointwise(Linearity::kMinimum));
  table.add({"aten::detach", "aten::alias", "aten::lift", "aten::lift_fresh", "aten::copy", "aten::zero",
             "aten::lift_fresh_copy", "aten::alias_copy", "aten::detach_copy"}, pointwise(Linearity::kCopy));
  table.add({"aten::_to_copy", "aten::_conj", "aten::_conj_physical"}, propose_conversion);
  table.add({"aten::abs", "aten::acos", "aten::acosh", "aten::asin", "aten::asinh", "aten::atan2", "aten::atanh",
             "aten::bitwise_and", "aten::bitwise_not", "aten::bitwise_or", "aten::bitwise_xor", "aten::ceil_divide",
             "aten::clamp", "aten::clamp_max", "aten::clamp_min", "aten::clone", "aten::contiguous", "aten::copysign",
             "aten::cos", "aten::cosh", "aten::digamma", "aten::eq", "aten::erfc", "aten::erfinv", "aten::exp2",
             "aten::floor_divide", "aten::fmod", "aten::frac", "aten::ge", "aten::gelu", "aten::gt", "aten::hardshrink",
             "aten::hardsigmoid", "aten::hardswish", "aten::heaviside", "aten::hypot", "aten::isinf", "aten::isnan",
             "aten::isneginf", "aten::isposinf", "aten::le", "aten::leaky_relu", "aten::lerp", "aten::lgamma",
             "aten::logaddexp", "aten::logaddexp2", "aten::logical_and", "aten::logical_not", "aten::logical_or",
             "aten::logical_xor", "aten::logit", "aten::lt", "aten::masked_fill", "aten::mish", "aten::mvlgamma",
             "aten::nan_to_num", "aten::ne", "aten::nextafter", "aten::pow", "aten::reciprocal", "aten::remainder",
             "aten::rsqrt", "aten::rsub", "aten::silu", "aten::sin", "aten::sinc", "aten::sinh", "aten::softshrink",
             "aten::square", "aten::tan", "aten::threshold", "aten::where", "aten::xlogy", "aten::addcdiv",
             "aten::addcmul", "aten::__and__", "aten::__or__", "aten::__xor__", "aten::__lshift__", "aten::__rshift__",
             "aten::bitwise_left_shift", "aten::bitwise_right_shift", "aten::fill", "aten::signbit", "aten::sgn",
             "aten::celu", "aten::selu", "aten::float_power", "aten::prelu_kernel", "aten::_prelu_kernel",
             "aten::huber_loss_pointwise", "aten::special_entr", "aten::i0"}, pointwise(Linearity::kNone));
  // Backward formulas that are themselves pointwise in the gradient and what was saved.
  table.add({"aten::threshold_backward", "aten::silu_backward", "aten::sigmoid_backward", "aten::tanh_backward",
             "aten::gelu_backward", "aten::leaky_relu_backward", "aten::elu_backward", "aten::hardtanh_backward",
             "aten::hardswish_backward", "aten::hardsigmoid_backward", "aten::softplus_backward", "aten::mish_backward",
             "aten::logit_backward", "aten::softshrink_backward", "aten::hardshrink_backward",
             "aten::log_sigmoid_backward"}, pointwise(Linearity::kNone));
}

}  // namespace tessera::detail
