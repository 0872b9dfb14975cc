// Samples for pointwise operations and their _foreach_ forms. The arguments are made from the schema. The tables below
// have the values for which an operation is defined.
#include "tests/conformance/samples/pointwise.h"

#include <set>

#include "tests/conformance/samples.h"

namespace tessera::testing {

namespace {

const std::set<std::string> kIntegers = {
    "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "bitwise_left_shift", "bitwise_right_shift",
    "__lshift__",  "__rshift__", "__ilshift__", "__irshift__", "__ixor__",           "__xor__",
    "gcd",         "lcm"};
const std::set<std::string> kFlags = {"logical_and", "logical_or", "logical_xor", "logical_not"};
const std::set<std::string> kComplex = {"_conj", "conj_physical"};
const std::set<std::string> kUnit = {"acos", "asin", "atanh", "erfinv"};
const std::set<std::string> kProbability = {"logit", "logit_backward", "special_ndtri"};
const std::set<std::string> kAboveOne = {"acosh", "mvlgamma", "special_zeta"};
const std::set<std::string> kPositive = {"log",
                                         "log2",
                                         "log10",
                                         "log1p",
                                         "sqrt",
                                         "rsqrt",
                                         "lgamma",
                                         "digamma",
                                         "polygamma",
                                         "igamma",
                                         "igammac",
                                         "pow",
                                         "float_power",
                                         "xlogy",
                                         "special_xlog1py",
                                         "reciprocal",
                                         "special_bessel_y0",
                                         "special_bessel_y1",
                                         "special_modified_bessel_k0",
                                         "special_modified_bessel_k1",
                                         "special_scaled_modified_bessel_k0",
                                         "special_scaled_modified_bessel_k1",
                                         "special_entr",
                                         "addcdiv"};
// Operations whose second operand is a divisor.
const std::set<std::string> kDivides = {"div", "true_divide", "remainder", "fmod", "floor_divide"};

bool holds_tensor(const c10::Type& type) {
  return type.kind() == c10::TypeKind::TensorType ||
         (type.kind() == c10::TypeKind::OptionalType && holds_tensor(*type.containedType(0)));
}

bool is_polynomial(const std::string& base) { return base.find("_polynomial_") != std::string::npos; }

}  // namespace

std::string pointwise_base(std::string name) {
  name = name.substr(name.find("::") + 2);
  if (name.starts_with("_foreach_")) name = name.substr(9);
  if (name.ends_with('_') && !name.ends_with("__")) name.pop_back();
  return name;
}

at::Tensor pointwise_operand(SampleMaker& make, const std::string& base, const std::string& argument,
                             at::IntArrayRef shape) {
  if (argument == "condition" || argument == "mask") return make.flags(shape);
  if (kIntegers.contains(base)) return make.integers(1, 6, shape);
  if (kFlags.contains(base)) return make.flags(shape);
  if (kComplex.contains(base)) return make.complex(shape);
  if (is_polynomial(base)) {
    return argument == "n" ? make.integers(0, 4, shape).to(at::kDouble) : make.uniform(-0.9, 0.9, shape);
  }
  if (base == "ldexp" && argument == "other") return make.integers(-2, 3, shape).to(at::kDouble);
  if (kUnit.contains(base)) return make.uniform(-0.9, 0.9, shape);
  if (kProbability.contains(base)) return make.uniform(0.1, 0.9, shape);
  if (kAboveOne.contains(base)) return make.uniform(1.5, 2.5, shape);
  if (kPositive.contains(base) || (kDivides.contains(base) && argument != "self")) return make.uniform(0.5, 1.5, shape);
  return make.normal(shape);
}

c10::IValue pointwise_number(const std::string& base, const std::string& argument) {
  if (argument == "min" || argument == "min_val") return -0.5;
  if (argument == "max" || argument == "max_val") return 0.5;
  if (argument == "alpha" || argument == "n" || kIntegers.contains(base)) return 2;
  if (argument == "threshold" || argument == "eps" || argument == "weight") return 0.25;
  return kAboveOne.contains(base) || kPositive.contains(base) || kDivides.contains(base) ? 2.5 : 0.75;
}

namespace {

// Adds a sample whose first tensor has the shape `shape` and whose further tensors have the shape `other`.
void add_one(SampleMaker& make, const std::string& base, at::IntArrayRef shape, at::IntArrayRef other) {
  NamedArguments arguments;
  bool first = true;
  for (const auto& argument : make.schema().arguments()) {
    const auto& type = *argument.type();
    const auto kind = type.kind() == c10::TypeKind::OptionalType ? type.containedType(0)->kind() : type.kind();
    if (argument.is_out()) continue;
    if (holds_tensor(type)) {
      arguments.emplace_back(argument.name(), pointwise_operand(make, base, argument.name(), first ? shape : other));
      first = false;
    } else if (kind == c10::TypeKind::NumberType &&
               (!argument.default_value() || argument.default_value()->isNone() || argument.name() == "alpha")) {
      arguments.emplace_back(argument.name(), pointwise_number(base, argument.name()));
    } else if (argument.default_value()) {
      continue;
    } else if (kind == c10::TypeKind::FloatType) {
      arguments.emplace_back(argument.name(), 0.25);
    } else if (kind == c10::TypeKind::IntType || kind == c10::TypeKind::SymIntType) {
      arguments.emplace_back(argument.name(), 2);
    } else if (kind == c10::TypeKind::StringType) {
      arguments.emplace_back(argument.name(), "floor");
    }
  }
  make.add(arguments);
}

void make_pointwise(SampleMaker& make) {
  const std::string base = pointwise_base(make.schema().name());
  const auto& arguments = make.schema().arguments();
  const auto tensors = std::ranges::count_if(
      arguments, [](const c10::Argument& argument) { return !argument.is_out() && holds_tensor(*argument.type()); });
  add_one(make, base, {make.n, make.m}, {make.n, make.m});
  if (tensors > 1 && !base.ends_with("_backward")) {
    add_one(make, base, {make.n, make.m}, {make.m});
    add_one(make, base, {make.n, make.m}, {make.n, 1});
  }
}

}  // namespace

void add_pointwise_samples(SampleTable& table) {
  table.add({"aten::to.dtype", "aten::_to_copy"}, [](SampleMaker& make) {
    make.add({{"self", make.normal({make.n, make.m})}, {"dtype", at::kFloat}}).tolerance = 1e-6;
    make.add({{"self", make.normal({make.n, make.m})}, {"dtype", at::kLong}});
  });
  table.add({"aten::max.other", "aten::max.out", "aten::min.other", "aten::min.out"}, make_pointwise);
  for (const auto& op : listed_ops()) {
    if (op.group.starts_with("pointwise") && !table.contains(op.name)) table.add(op.name, make_pointwise);
  }
}

}  // namespace tessera::testing
