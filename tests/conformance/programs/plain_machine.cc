// Runs a program on plain tensors, as one of its twins.
#include <ATen/MemoryOverlap.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <set>

#include "tests/conformance/programs/evaluate.h"
#include "tests/conformance/programs/inputs.h"

namespace tessera::testing {

at::Tensor PlainMachine::input(const Step& step, uint64_t seed) {
  at::Tensor made = make_plain(step, seed);
  if (twin_ == Twin::kWide) made = made.to(type_of(made.scalar_type()));
  return made.set_requires_grad(step.grad);
}

// A DTensor that has the placements already is passed on without a copy. If an earlier step was removed, a tensor may
// have fewer dims than drawn.
at::Tensor PlainMachine::redistribute(const at::Tensor& tensor, const Step& step) {
  for (const auto& placement : step.placements) {
    if (placement.is_any_shard() && placement.dim >= tensor.dim()) {
      throw std::runtime_error(fmt::format("program: {} of a tensor of {} dims", to_text(step), tensor.dim()));
    }
  }
  return twin_ == Twin::kContrary ? at::alias(tensor) : tensor.clone();
}

c10::ScalarType PlainMachine::type_of(c10::ScalarType asked) const {
  if (twin_ != Twin::kWide || !is_narrow(asked)) return asked;
  return c10::isComplexType(asked) ? at::kComplexDouble : at::kDouble;
}

namespace {

// Whether the operation may read elements after it has written others.
bool reads_elsewhere(const std::string& op) {
  static const char* const kStarts[] = {"addmm_", "addbmm_",  "baddbmm_",        "addmv_", "addr_",
                                        "index_", "scatter_", "masked_scatter_", "put_",   "cum"};
  return std::any_of(std::begin(kStarts), std::end(kStarts), [&](const char* start) { return op.starts_with(start); });
}

bool has_derivative(const std::string& op) {
  static const char* const kStarts[] = {"logical_", "bitwise_", "heaviside_", "floor_divide_", "eq_",
                                        "ne_",      "lt_",      "le_",        "gt_",           "ge_"};
  return std::none_of(std::begin(kStarts), std::end(kStarts), [&](const char* start) { return op.starts_with(start); });
}

// Whether the divisors are powers of two, so that a quotient of shares is as exact as the quotient of the whole.
bool divides_evenly(const Step& step, const Results& values) {
  const auto is_power = [](double x) {
    int exponent = 0;
    return std::abs(std::frexp(x, &exponent)) == 0.5;
  };
  const Arg& by = step.args[step.op.starts_with("addcdiv") ? 2 : 1];
  if (const auto* x = std::get_if<double>(&by.value)) return is_power(*x);
  if (const auto* n = std::get_if<int64_t>(&by.value)) return is_power(static_cast<double>(*n));
  const auto* id = std::get_if<Arg::Ref>(&by.value);
  if (id == nullptr || values.tensors[id->id].is_complex()) return false;
  // If the divisor was overwritten by the result, its former value is not known.
  const auto* divided = std::get_if<Arg::Ref>(&step.args[0].value);
  if (divided != nullptr && values.tensors[id->id].is_alias_of(values.tensors[divided->id])) return false;
  const at::Tensor divisor = values.tensors[id->id].detach().to(at::kDouble).contiguous();
  return std::all_of(divisor.const_data_ptr<double>(), divisor.const_data_ptr<double>() + divisor.numel(), is_power);
}

bool divides(const std::string& op) {
  return op.starts_with("div") || op.starts_with("true_divide") || op.starts_with("addcdiv") ||
         op.starts_with("_foreach_div");
}

// Operations that add numbers, and of these the operations that add products.
bool is_cross_product(const std::string& op) { return op == "cross" || op == "linalg_cross"; }
bool multiplies_and_adds(const std::string& op) {
  static const std::set<std::string> kNames{"mm",    "bmm",   "matmul", "linear",   "mv",       "dot",
                                            "vdot",  "addmm", "addmm_", "baddbmm",  "baddbmm_", "addbmm",
                                            "addmv", "inner", "einsum", "tensordot"};
  return op.starts_with("tessera::linear") || is_cross_product(op) || kNames.contains(op.substr(0, op.find('.')));
}
bool adds(const std::string& op) {
  static const std::set<std::string> kNames{"sum", "nansum", "cumsum", "cumsum_", "trace"};
  return multiplies_and_adds(op) || kNames.contains(op.substr(0, op.find('.')));
}

int bits_of(c10::ScalarType type) { return type == at::kBFloat16 ? 8 : type == at::kHalf ? 11 : 24; }

// Returns the elements as real doubles.
at::Tensor numbers_of(const at::Tensor& tensor) {
  const at::Tensor data = tensor.detach().resolve_conj();
  return (data.is_complex() ? at::view_as_real(data) : data).to(at::kDouble).contiguous();
}

// Returns the exponent of the last bit of the elements, or of their shares, which are shifted by a half.
int last_bit(const at::Tensor& tensor) {
  const at::Tensor data = numbers_of(tensor);
  int last = -1;
  for (int64_t i = 0; i < data.numel(); ++i) {
    int exponent = 0;
    const auto mantissa = static_cast<int64_t>(std::ldexp(std::frexp(data.const_data_ptr<double>()[i], &exponent), 53));
    last = mantissa == 0 ? last : std::min(last, exponent - 53 + std::countr_zero(static_cast<uint64_t>(mantissa)));
  }
  return last;
}

[[noreturn]] void leave_open(const Step& step, const char* what) {
  throw std::runtime_error(fmt::format("program: {} {}", to_text(step), what));
}

// Whether a sum of numbers of narrow types may round in some order, or with some shares. The sum of the magnitudes must
// fit into the bits of the type, down to the last bit.
bool may_round_sums(const Step& step, const Results& values) {
  const at::NoGradGuard no_grad;
  Results magnitudes = values;
  int bits = 53, last = 0;
  double most_of_two_products = 2;
  for (const int id : refs_of(step.args)) {
    const at::Tensor& operand = values.tensors.at(id);
    if (!takes_gradients(operand.scalar_type()) || operand.numel() == 0) continue;
    bits = is_narrow(operand.scalar_type()) ? std::min(bits, bits_of(operand.scalar_type())) : bits;
    last = multiplies_and_adds(step.op) ? last + last_bit(operand) : std::min(last, last_bit(operand));
    const at::Tensor magnitude = numbers_of(operand).abs() + 0.5;
    most_of_two_products *= magnitude.max().item<double>();
    magnitudes.tensors[id] = operand.is_complex() ? at::view_as_complex(magnitude) : magnitude;
  }
  if (bits == 53) return false;
  // A cross product subtracts its products, so the magnitudes would not add up.
  if (is_cross_product(step.op)) return most_of_two_products > std::ldexp(1.0, last + bits);
  Step open = step;
  PlainMachine(Twin::kWide).run_open(open, magnitudes, 0);
  const auto fits = [&](int id) {
    const at::Tensor& sum = magnitudes.tensors[id];
    return sum.numel() == 0 || numbers_of(sum).abs().max().item<double>() <= std::ldexp(1.0, last + bits);
  };
  return !std::ranges::all_of(open.results, fits);
}

// Whether a share of a product may leave the range of its narrow type, although the whole product does not.
bool may_leave_range(const Step& step, const Results& values) {
  if (step.op.substr(0, step.op.find('.')) != "prod") return false;
  const at::NoGradGuard no_grad;
  const at::Tensor& operand = values.tensors.at(refs_of(step.args).front());
  if (!is_narrow(operand.scalar_type()) || operand.numel() == 0) return false;
  const at::Tensor sizes = operand.detach().abs().to(at::kDouble);
  const auto exponents = [](const at::Tensor& factors) { return factors.log2().sum().item<double>(); };
  const bool half = operand.scalar_type() == at::kHalf;
  return exponents(sizes.clamp_min(1)) > (half ? 15 : 127) ||
         exponents(at::where(sizes.eq(0), at::ones_like(sizes), sizes).clamp_max(1)) < (half ? -14 : -126);
}

// Whether autograd computes the view again by a call of its operation. The operation does not see that the shape was
// changed in place since, so PyTorch gives another gradient than for its own out-of-place form.
bool is_taken_again_by_operation(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_view_autograd_meta(tensor);
  return meta != nullptr && meta->has_bw_view() && meta->get_backward_view().has_view_fn();
}

bool changes_shape_in_place(const std::string& op) {
  static const std::set<std::string> kNames{"t_", "transpose_", "swapdims_", "swapaxes_", "squeeze_", "unsqueeze_"};
  return kNames.contains(op.substr(0, op.find('.')));
}

// For these types libtorch's scalar kernel and its vector kernel give different last bits.
bool differs_by_place(const Step& step, const Results& values) {
  if (step.op != "special_i0e") return false;
  const auto type = values.tensors.at(refs_of(step.args).front()).scalar_type();
  return type == at::kBFloat16 || type == at::kHalf;
}

// Whether the derivative is a difference of two numbers that are nearly equal. If a zero is moved by rounding, in a
// twin or in shares, its derivative may be any number.
bool differentiates_by_cancellation(const Step& step, const Results& values) {
  if (!step.op.starts_with("sinc")) return false;
  const auto& operand = values.tensors.at(refs_of(step.args).front());
  if (!operand.requires_grad()) return false;
  const at::Tensor sizes = operand.detach().abs();
  return sizes.gt(0).logical_and(sizes.lt(1e-6)).any().item<bool>();
}

// Whether the step compares numbers with zero.
bool asks_for_truth(const Step& step) {
  static const std::set<std::string> kNames{"any", "all", "count_nonzero", "nonzero", "heaviside", "heaviside_"};
  const auto name = step.op.substr(0, step.op.find('.'));
  const auto is_bool = [](const Arg& arg) {
    const auto* dtype = std::get_if<Arg::Dtype>(&arg.value);
    return dtype != nullptr && dtype->type == at::kBool;
  };
  return name.starts_with("logical_") || kNames.contains(name) ||
         (name == "to" && std::ranges::any_of(step.args, is_bool));
}

// Whether the step compares numbers that only rounding makes equal or zero. The disturbances of the twins do not make
// them equal.
bool asks_whether_nearly_equal(const Step& step, const Results& values) {
  const at::NoGradGuard no_grad;
  const auto is_near = [](const at::Tensor& apart) {
    return apart.gt(0).logical_and(apart.lt(1e-11)).any().item<bool>();
  };
  if (asks_for_truth(step)) {
    const auto refs = refs_of(step.args);
    return std::ranges::any_of(refs, [&](int id) {
      const auto& operand = values.tensors.at(id);
      return takes_gradients(operand.scalar_type()) && is_near(operand.detach().to(at::kComplexDouble).abs());
    });
  }
  const auto name = step.op.substr(0, step.op.find('.'));
  const bool among = name == "isin";
  if (!among && name != "eq" && name != "ne" && name != "eq_" && name != "ne_") return false;
  const auto number = [&](const Arg& arg) {
    if (const auto* id = std::get_if<Arg::Ref>(&arg.value)) {
      return values.tensors.at(id->id).detach().to(at::kComplexDouble);
    }
    const auto* integer = std::get_if<int64_t>(&arg.value);
    const auto* real = std::get_if<double>(&arg.value);
    return at::full({}, integer ? static_cast<double>(*integer) : real ? *real : 0.0, at::kComplexDouble);
  };
  const at::Tensor a = number(step.args[0]), b = number(step.args[1]);
  return is_near((among ? a.reshape({-1, 1}) - b.reshape({1, -1}) : a - b).abs());
}

}  // namespace

void PlainMachine::before(const Step& step, const Results& values) {
  if (twin_ == Twin::kClean && adds(step.op) && may_round_sums(step, values)) {
    leave_open(step, "adds up more than the type holds, though the whole may be held");
  }
  if (twin_ == Twin::kClean && may_leave_range(step, values)) {
    leave_open(step, "multiplies more than the type holds, though the whole may be held");
  }
  if (twin_ == Twin::kClean && asks_whether_nearly_equal(step, values)) {
    leave_open(step, "asks whether numbers are equal, or zero, that rounding may make so");
  }
  if (twin_ == Twin::kClean && differs_by_place(step, values)) {
    leave_open(step, "has another last bit in each kernel of libtorch");
  }
  if (differentiates_by_cancellation(step, values)) leave_open(step, "has a derivative that rounding decides");
  if (changes_shape_in_place(step.op) && is_taken_again_by_operation(values.tensors.at(refs_of(step.args).front()))) {
    leave_open(step, "changes the shape of a view that is taken again as it was");
  }
  if (!writes(step)) return;
  std::vector<int> written, read;
  const auto& arguments = find_op(step.op).schema().arguments();
  for (size_t i = 0; i < step.args.size() && i < arguments.size(); ++i) {
    const auto ids = refs_of({step.args[i]});
    const auto* alias = arguments[i].alias_info();
    auto& list = alias != nullptr && alias->isWrite() ? written : read;
    list.insert(list.end(), ids.begin(), ids.end());
  }
  for (size_t i = 0; i < written.size(); ++i) {
    const at::Tensor& target = values.tensors.at(written[i]);
    const auto shares = [&](const at::Tensor& other) { return target.is_alias_of(other); };
    const auto open = [&](int id) {
      const at::Tensor& other = values.tensors.at(id);
      const bool same = target.sizes() == other.sizes() && target.strides() == other.strides() &&
                        target.storage_offset() == other.storage_offset();
      return shares(other) && (!same || reads_elsewhere(step.op));
    };
    if (std::ranges::any_of(read, open) || std::any_of(written.begin(), written.begin() + static_cast<int64_t>(i),
                                                       [&](int id) { return shares(values.tensors.at(id)); })) {
      leave_open(step, "writes to what it reads");
    }
    if (std::ranges::any_of(frozen_, shares)) leave_open(step, "writes to what may be shared or not");
  }
  const auto takes_gradient = [&](int id) { return values.tensors.at(id).requires_grad(); };
  if (!has_derivative(step.op) &&
      (std::ranges::any_of(written, takes_gradient) || std::ranges::any_of(read, takes_gradient))) {
    leave_open(step, "has no derivative");
  }
}

namespace {

bool is_one_of(const std::string& op, std::initializer_list<const char*> parts) {
  return std::ranges::any_of(parts, [&](const char* part) { return op.find(part) != std::string::npos; });
}

// Operations with an inner division or root. Their results may be inexact on other ranks although they are exact here.
bool rounds_inside(const std::string& op) {
  return is_one_of(op, {"mean", "var", "std",    "norm", "div",  "softmax", "sumexp", "prod", "entropy", "loss",
                        "kl_",  "nll", "cosine", "pow",  "dist", "inv",     "solve",  "det",  "pool",    "reciprocal"});
}

// Operations whose results may be exact although their inner sums and roots are not.
bool rounds_in_sums(const std::string& op) {
  return is_one_of(op,
                   {"mean", "var", "std", "norm", "softmax", "sumexp", "prod", "cosine", "entropy", "loss", "dist"});
}

// Of the operations above, those that give zeros for zeros only. The others may give a zero by a sum that was rounded
// before.
bool keeps_zeros(const std::string& op) { return is_one_of(op, {"prod", "rms_norm", "vector_norm"}); }

bool is_coarse(double x) { return std::abs(x) < 0x1p20 && x * 0x1p20 == std::rint(x * 0x1p20); }

// The values of a result that are disturbed: those that are not exact in a few bits, or all. `zero` is the value that
// zeros become. It has either sign, because shares may add up to either. The two twins always have opposite signs.
struct Disturbance {
  bool all = false;
  bool contrary = false;
  double zero = 0;
};

void disturb_along(double* data, at::IntArrayRef sizes, at::IntArrayRef strides, const Disturbance& how,
                   uint64_t& state) {
  const auto& [all, contrary, zero] = how;
  if (sizes.empty()) {
    if (*data == 0) {
      *data = ((next_number(state) & 1) != 0) != contrary ? -zero : zero;
    } else if (all || !is_coarse(*data)) {
      const uint64_t bits = next_number(state);  // large enough to survive rounding
      const double size = 1e-13 * (0.5 + static_cast<double>(bits >> 11) * 0x1p-54);
      *data *= ((bits & 1) != 0) != contrary ? 1 - size : 1 + size;
    }
    return;
  }
  for (int64_t i = 0; i < sizes[0]; ++i) {
    disturb_along(data + i * strides[0], sizes.slice(1), strides.slice(1), how, state);
  }
}

// Neither autograd nor the version counter sees the change.
void disturb(const at::Tensor& tensor, const Disturbance& how, uint64_t& state) {
  if (!tensor.defined()) return;
  at::Tensor data = tensor.variable_data();
  data = data.is_conj() ? at::_conj(data) : data;  // as in memory
  data = data.is_neg() ? at::_neg_view(data) : data;
  if (data.is_complex()) data = at::view_as_real(data);
  if (data.scalar_type() == at::kDouble && data.numel() > 0) {
    disturb_along(data.mutable_data_ptr<double>(), data.sizes(), data.strides(), how, state);
  } else if (data.is_floating_point()) {
    data.masked_fill_(data.eq(0), how.contrary ? -0.0 : 0.0);
  }
}

// Whether each operand is divided by its norm in its own type, and the quotients are multiplied in the common type. A
// quotient that is exact for the whole may be rounded in shares.
bool divides_before_it_widens(const Step& step, const Tensors& arguments) {
  return step.op == "cosine_similarity" && arguments[0].scalar_type() != arguments[1].scalar_type();
}

// Changes the values so that no narrow type holds them.
void make_inexact(const at::Tensor& tensor, bool zeros) {
  if (!takes_gradients(tensor.scalar_type())) return;
  const at::Tensor data = tensor.variable_data();
  data.mul_(1 + 1e-14);
  if (zeros) data.masked_fill_(data.eq(0), 1e-14);
}

// Whether the operation multiplies by a number without a finite binary representation.
bool scales(const std::string& op) { return op.starts_with("rad2deg") || op.starts_with("deg2rad"); }

// Whether the results may be exact although the results of shares are not: the operation divides, takes roots, or
// multiplies by a number without a finite binary representation.
bool rounds_in_shares(const Step& step, const Results& values) {
  return rounds_in_sums(step.op) || scales(step.op) || (divides(step.op) && !divides_evenly(step, values));
}

// Whether a zero may have shares that are rounded and do not add up to zero. The shares are divided or multiplied by
// numbers whose products need more bits than the type has.
bool may_round_to_zero(const Step& step, const Results& values, const Tensors& arguments) {
  if (is_one_of(step.op, {"rms_norm", "layer_norm"})) {
    return true;  // by the product with a weight
  }
  if (rounds_in_shares(step, values) && !keeps_zeros(step.op)) return true;
  if (step.op.find("mul") == std::string::npos && !multiplies_and_adds(step.op)) return false;
  const auto is_fine = [](const Arg& arg) {
    const auto* number = std::get_if<double>(&arg.value);
    return number != nullptr && !is_coarse(*number);
  };
  if (std::ranges::any_of(step.args, is_fine)) return true;
  return std::ranges::any_of(arguments, [](const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.scalar_type() != at::kDouble) return false;
    const at::Tensor numbers = numbers_of(tensor);
    const auto* data = numbers.const_data_ptr<double>();
    return !std::all_of(data, data + numbers.numel(), is_coarse);
  });
}

bool rounds(const Placements& placements) {
  return std::ranges::any_of(placements, [](const Placement& p) {
    return p.kind == Placement::Kind::kNormPartial || p.is_partial(ReduceOp::kAvg);
  });
}

// The gradient of a minimum or maximum is divided among the equal elements. The quotient is exact for two elements
// only.
bool may_round_among_equals(const Step& step, const Results& values) {
  static const std::set<std::string> kNames{"min", "max", "amin", "amax", "aminmax", "median", "nanmedian"};
  const auto ids = refs_of(step.args);
  if (!kNames.contains(step.op.substr(0, step.op.find('.'))) || ids.empty()) return false;
  const at::Tensor& operand = values.tensors.at(ids.front());
  if (!operand.requires_grad() || !is_narrow(operand.scalar_type()) || operand.numel() == 0) return false;
  const auto counts = std::get<2>(at::_unique2(operand.detach(), /*sorted=*/true, /*return_inverse=*/false,
                                               /*return_counts=*/true));
  return counts.max().item<int64_t>() > 2;
}

// Whether a tensor is divided by itself. Its gradient is then the sum of two terms that cancel.
bool divides_by_itself(const Step& step, const Results& values) {
  if (!divides(step.op)) return false;
  const size_t first = step.op.starts_with("addcdiv") ? 1 : 0;
  const auto* a = std::get_if<Arg::Ref>(&step.args[first].value);
  const auto* b = std::get_if<Arg::Ref>(&step.args[first + 1].value);
  return a != nullptr && b != nullptr && values.tensors[a->id].is_alias_of(values.tensors[b->id]);
}

// Whether the gradient of a narrow operand has terms that are rounded before they cancel. These are quotients (also in
// the derivatives of copysign and hypot) and the two products of a cross product of parallel vectors.
bool may_round_before_it_cancels(const Step& step, const Results& values) {
  const bool cancels = (divides(step.op) && !divides_evenly(step, values)) || divides_by_itself(step, values) ||
                       step.op.starts_with("copysign") || step.op.starts_with("hypot") || is_cross_product(step.op);
  const auto ids = refs_of(step.args);
  return cancels && std::ranges::any_of(ids, [&](int id) {
           return values.tensors.at(id).requires_grad() && is_narrow(values.tensors.at(id).scalar_type());
         });
}

// Whether the gradient is divided by a deviation that consists of rounding errors only. Shares of the gradient are then
// so large that they hide the rest, even if later steps make the whole gradient zero.
bool divides_by_rounding(const Step& step, const Results& values) {
  const auto ids = refs_of(step.args);
  if (!step.op.starts_with("std") || ids.empty() || !values.tensors.at(ids.front()).requires_grad()) return false;
  const at::Tensor deviation = values.tensors.at(step.results[0]).detach();
  return deviation.numel() < values.tensors.at(ids.front()).numel() && deviation.lt(1e-6).any().item<bool>();
}

}  // namespace

void PlainMachine::after(const Step& step, const Results& values, const Tensors& arguments) {
  if (may_share(step)) {
    frozen_.insert(frozen_.end(), arguments.begin(), arguments.end());
    frozen_.push_back(values.tensors[step.results[0]]);
  }
  for (const int id : step.results) {
    const at::Tensor& result = values.tensors[id];
    const auto shares = [&](const at::Tensor& argument) { return argument.is_alias_of(result); };
    if (result.defined() && std::ranges::none_of(arguments, shares) &&
        at::has_internal_overlap(result) != at::MemOverlap::No) {
      leave_open(step, "gives a tensor of which several elements may share memory");
    }
  }
  if (divides_before_it_widens(step, arguments) || may_round_among_equals(step, values) ||
      may_round_before_it_cancels(step, values)) {
    leave_open(step, "may round in a narrow type what it gives in a wide one");
  }
  if (divides_by_rounding(step, values)) leave_open(step, "has a derivative that rounding decides");
  if (twin_ == Twin::kWide && step.kind == Step::Kind::kCall && rounds_in_shares(step, values)) {
    for (const int id : step.results) make_inexact(values.tensors[id], !keeps_zeros(step.op));
  }
  const bool contrary = twin_ == Twin::kContrary;
  if (twin_ != Twin::kNoisy && !contrary) return;
  if (step.kind == Step::Kind::kInput) {
    uint64_t own = static_cast<uint64_t>(step.results[0]) + 1;
    if (rounds(step.placements)) disturb(values.tensors[step.results[0]], {.all = true, .contrary = contrary}, own);
    return;
  }
  // The state is the same for a step in every run.
  uint64_t state = step.results.empty() ? 0 : static_cast<uint64_t>(step.results[0]) * 0x51ed2701 + 1;
  const Disturbance how{.all = rounds_inside(step.op),
                        .contrary = contrary,
                        .zero = may_round_to_zero(step, values, arguments) ? 1e-30 : 0.0};
  const bool written = writes(step);
  for (const int id : step.results) {
    const at::Tensor& result = values.tensors[id];
    const bool aliases =
        std::ranges::any_of(arguments, [&](const at::Tensor& tensor) { return tensor.is_alias_of(result); });
    if (written || !aliases) disturb(result, how, state);
  }
}

}  // namespace tessera::testing
