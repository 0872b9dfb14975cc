// Elementwise operations.
#include "tests/conformance/programs/catalog.h"

namespace tessera::testing {

namespace {

struct Unary {
  const char* op;
  double low = -1e4, high = 1e4;
  const char* kinds = "f";
  bool in_place = true;
};

// The domain of each operation, restricted to values where the operation is smooth enough to compare.
const Unary kUnaries[] = {
    {"abs", -1e4, 1e4, "fci"},
    {"acos", -0.9, 0.9},
    {"acosh", 1.1, 5},
    {"asin", -0.9, 0.9},
    {"asinh"},
    {"atan"},
    {"atanh", -0.9, 0.9},
    {"ceil", -1e4, 1e4, "fi"},
    {"celu"},
    {"cos", -20, 20, "fc"},
    {"cosh", -4, 4},
    {"deg2rad"},
    {"digamma", 0.5, 5},
    {"elu"},
    {"erf"},
    {"erfc"},
    {"erfinv", -0.9, 0.9},
    {"exp", -5, 4, "fc"},
    {"exp2", -5, 5},
    {"expm1", -5, 4},
    {"floor", -1e4, 1e4, "fi"},
    {"frac"},
    {"gelu"},
    {"hardshrink", -1e4, 1e4, "f", false},
    {"hardsigmoid"},
    {"hardswish"},
    {"hardtanh"},
    {"i0", -4, 4},
    {"leaky_relu"},
    {"lgamma", 0.3, 5},
    {"log", 0.1, 50},
    {"log10", 0.1, 50},
    {"log1p", -0.8, 50},
    {"log2", 0.1, 50},
    {"logit", 0.1, 0.9},
    {"log_sigmoid", -1e4, 1e4, "f", false},
    {"mish"},
    {"nan_to_num"},
    {"neg", -1e4, 1e4, "fci"},
    {"positive", -1e4, 1e4, "fc", false},
    {"rad2deg"},
    {"reciprocal", 0.2, 50},
    {"relu"},
    {"relu6"},
    {"round"},
    {"rsqrt", 0.1, 50},
    {"selu"},
    {"sgn", -1e4, 1e4, "f"},
    {"sigmoid"},
    {"sign", -1e4, 1e4, "fi"},
    {"signbit", -1e4, 1e4, "fi", false},
    {"silu"},
    {"sin", -20, 20, "fc"},
    {"sinc", -5, 5},
    {"sinh", -4, 4},
    {"softplus", -1e4, 1e4, "f", false},
    {"softshrink", -1e4, 1e4, "f", false},
    {"special_entr", 0.1, 5, "f", false},
    {"special_erfcx", -1, 3, "f", false},
    {"special_i0e", -1e4, 1e4, "f", false},
    {"special_i1", -4, 4, "f", false},
    {"special_i1e", -20, 20, "f", false},
    {"special_log_ndtr", -4, 4, "f", false},
    {"special_ndtri", 0.1, 0.9, "f", false},
    {"special_bessel_j0", 0.1, 9, "f", false},
    {"special_modified_bessel_i0", -4, 4, "f", false},
    {"sqrt", 0.1, 50},
    {"square", -50, 50},
    {"tan", -1.3, 1.3},
    {"tanh"},
    {"trunc"},
    {"isnan", -1e4, 1e4, "fc", false},
    {"isinf", -1e4, 1e4, "f", false},
    {"isfinite", -1e4, 1e4, "f", false},
    {"isposinf", -1e4, 1e4, "f", false},
    {"isneginf", -1e4, 1e4, "f", false},
    {"logical_not", -1e4, 1e4, "fib"},
    {"bitwise_not", -1e4, 1e4, "ib"},
    {"angle", -1e4, 1e4, "f", false},
    {"conj_physical", -1e4, 1e4, "c"},
    {"conj", -1e4, 1e4, "c", false},
    {"resolve_conj", -1e4, 1e4, "c", false},
    {"real", -1e4, 1e4, "c", false},
    {"imag", -1e4, 1e4, "c", false},
};

// The operation writes in place now and then, if a tensor may be written to.
Row unary(const Unary& one) {
  const std::string op = one.op;
  return {op, [one, op](Draw& draw) {
            const Wish wish{.kinds = one.kinds, .low = one.low, .high = one.high};
            if (one.in_place && draw.chance(25)) {
              if (const auto self = draw.target(wish)) return draw.call(op + "_", {ref(*self)});
            }
            return draw.call(op, {ref(draw.value(wish))});
          }};
}

struct Binary {
  const char* op;  // without overload
  const char* overload = ".Tensor";
  const char* kinds = "f";
  double low = -1e4, high = 1e4;              // of the first operand
  double other_low = -1e4, other_high = 1e4;  // of the second operand
  bool in_place = true;
};

const Binary kBinaries[] = {
    {"add", ".Tensor", "fcib"},
    {"sub", ".Tensor", "fci"},
    {"mul", ".Tensor", "fcib"},
    {"div", ".Tensor", "fc", -1e4, 1e4, 0.2, 50},
    {"true_divide", ".Tensor", "f", -1e4, 1e4, 0.2, 50},
    {"floor_divide", "", "fi", -1e4, 1e4, 0.2, 50, false},
    {"atan2", "", "f", 0.2, 50},
    {"copysign", ".Tensor"},
    {"fmax", "", "fi", -1e4, 1e4, -1e4, 1e4, false},
    {"fmin", "", "fi", -1e4, 1e4, -1e4, 1e4, false},
    {"fmod", ".Tensor", "f", -50, 50, 0.3, 50},
    {"remainder", ".Tensor", "fi", -50, 50, 0.3, 50},
    {"hypot", "", "f", 0.2, 50},
    {"logaddexp", "", "f", -20, 20, -20, 20, false},
    {"logaddexp2", "", "f", -20, 20, -20, 20, false},
    {"maximum", "", "fi", -1e4, 1e4, -1e4, 1e4, false},
    {"minimum", "", "fi", -1e4, 1e4, -1e4, 1e4, false},
    {"max", ".other", "fi", -1e4, 1e4, -1e4, 1e4, false},
    {"min", ".other", "fi", -1e4, 1e4, -1e4, 1e4, false},
    {"pow", ".Tensor_Tensor", "f", 0.3, 4, -2, 2, false},
    {"float_power", ".Tensor_Tensor", "f", 0.3, 4, -2, 2, false},
    {"xlogy", ".Tensor", "f", -20, 20, 0.1, 50},
    {"special_xlog1py", "", "f", -20, 20, -0.8, 50, false},
    {"heaviside", "", "f"},
    {"ldexp", ".Tensor", "f", -50, 50, -4, 4, false},
    {"gcd", "", "i"},
    {"lcm", "", "i"},
    {"bitwise_and", ".Tensor", "ib"},
    {"bitwise_or", ".Tensor", "ib"},
    {"bitwise_xor", ".Tensor", "ib"},
    {"bitwise_left_shift", ".Tensor", "i", 0, 50, 0, 4},
    {"bitwise_right_shift", ".Tensor", "i", 0, 50, 0, 4},
    {"__and__", ".Tensor", "ib", -1e4, 1e4, -1e4, 1e4, false},
    {"__or__", ".Tensor", "ib", -1e4, 1e4, -1e4, 1e4, false},
    {"__xor__", ".Tensor", "ib", -1e4, 1e4, -1e4, 1e4, false},
    {"logical_and", "", "fib"},
    {"logical_or", "", "fib"},
    {"logical_xor", "", "fib"},
    {"eq", ".Tensor", "fcib"},
    {"ne", ".Tensor", "fcib"},
    {"lt", ".Tensor", "fi"},
    {"le", ".Tensor", "fi"},
    {"gt", ".Tensor", "fi"},
    {"ge", ".Tensor", "fi"},
    {"rsub", ".Tensor", "fc", -1e4, 1e4, -1e4, 1e4, false},
    {"complex", "", "f", -1e4, 1e4, -1e4, 1e4, false},
};

Row binary(const Binary& one) {
  return {std::string(one.op) + one.overload, [one](Draw& draw) {
            const Wish wish{.kinds = one.kinds, .low = one.low, .high = one.high};
            const std::string name = one.op;
            const auto write = one.in_place && draw.chance(25) ? draw.target(wish) : std::nullopt;
            const int self = write ? *write : draw.value(wish);
            const int other = draw.chance(8) && one.other_low < -1e3
                                  ? self
                                  : draw.partner(self, one.kinds, one.other_low, one.other_high);
            const std::string op = name + (write ? "_" : "") + one.overload;
            if ((name == "add" || name == "sub") && draw.chance(20)) {
              return draw.call(op, {ref(self), ref(other), num(draw.between(-2, 3))});
            }
            return draw.call(op, {ref(self), ref(other)});
          }};
}

struct WithScalar {
  const char* op;
  const char* overload = ".Scalar";
  const char* kinds = "f";
  double low = -1e4, high = 1e4;
  std::vector<double> scalars{-2, -1, -0.5, 0.5, 1, 2, 3};
  bool in_place = true;
};

const std::vector<WithScalar>& with_scalars() {
  static const std::vector<WithScalar> all{
      {"add", ".Scalar", "fc"},
      {"sub", ".Scalar", "fc"},
      {"mul", ".Scalar", "fc"},
      {"div", ".Scalar", "fc"},
      {"rsub", ".Scalar", "f", -1e4, 1e4, {1, 2}, false},
      {"pow", ".Tensor_Scalar", "f", 0.3, 20, {0.5, 1, 2, 3, -1}, false},
      {"pow", ".Scalar", "f", -2, 3, {0.5, 2, 3}, false},
      {"float_power", ".Tensor_Scalar", "f", 0.3, 20, {0.5, 2, -1}, false},
      {"remainder", ".Scalar", "f", -50, 50, {0.75, 2}},
      {"fmod", ".Scalar", "f", -50, 50, {0.75, 2}},
      {"xlogy", ".Scalar_Other", "f", -50, 50, {0.5, 2}},
      {"eq", ".Scalar", "fib", -1e4, 1e4, {0, 1}},
      {"ne", ".Scalar", "fib", -1e4, 1e4, {0, 1}},
      {"lt", ".Scalar", "fi"},
      {"le", ".Scalar", "fi"},
      {"gt", ".Scalar", "fi"},
      {"ge", ".Scalar", "fi"},
      {"clamp_min", "", "f"},
      {"clamp_max", "", "f"},
      {"copysign", ".Scalar", "f"},
      {"isin", ".Tensor_Scalar", "fi", -1e4, 1e4, {0, 1}, false},
      {"mvlgamma", "", "f", 1.1, 5, {1, 2}},
  };
  return all;
}

Row with_scalar(const WithScalar& one) {
  return {std::string(one.op) + one.overload, [one](Draw& draw) {
            const Wish wish{.kinds = one.kinds, .low = one.low, .high = one.high};
            const auto write = one.in_place && draw.chance(30) ? draw.target(wish) : std::nullopt;
            const Arg self = ref(write ? *write : draw.value(wish));
            const double drawn = draw.one_of(one.scalars);
            const bool whole = drawn == static_cast<double>(static_cast<int64_t>(drawn));
            const Arg scalar = whole && (one.op == std::string("mvlgamma") || draw.chance(40))
                                   ? num(static_cast<int64_t>(drawn))
                                   : num(drawn);
            const bool first = one.overload == std::string(".Scalar") && one.op == std::string("pow");
            return draw.call(std::string(one.op) + (write ? "_" : "") + one.overload,
                             first ? std::vector<Arg>{scalar, self} : std::vector<Arg>{self, scalar});
          }};
}

std::vector<Row> ternaries() {
  const auto three = [](const char* op, double last_low, double last_high, bool factor) {
    return Row{op, [=](Draw& draw) {
                 const auto write = draw.chance(25) ? draw.target({}) : std::nullopt;
                 const int self = write ? *write : draw.value({});
                 const int one = draw.partner(self, "f");
                 const int two = draw.partner(self, "f", last_low, last_high);
                 std::vector<Arg> args{ref(self), ref(one), ref(two)};
                 if (factor) args.push_back(num(draw.coefficient()));
                 const std::string name = op;
                 const size_t dot = std::min(name.find('.'), name.size());
                 return draw.call(write ? name.substr(0, dot) + "_" + name.substr(dot) : name, args);
               }};
  };
  return {
      three("addcmul", -1e4, 1e4, true),
      three("addcdiv", 0.2, 50, true),
      three("lerp.Tensor", -1e4, 1e4, false),
      three("clamp.Tensor", -1e4, 1e4, false),
      {"lerp.Scalar",
       [](Draw& draw) {
         const auto write = draw.chance(25) ? draw.target({}) : std::nullopt;
         const int self = write ? *write : draw.value({});
         return draw.call(write ? "lerp_.Scalar" : "lerp.Scalar", {ref(self), ref(draw.partner(self, "f")), num(0.25)});
       }},
      {"clamp",
       [](Draw& draw) {
         const auto write = draw.chance(25) ? draw.target({}) : std::nullopt;
         const int self = write ? *write : draw.value({});
         return draw.call(write ? "clamp_" : "clamp", {ref(self), num(-0.75), num(1.25)});
       }},
      {"where.self",
       [](Draw& draw) {
         const int self = draw.value({.kinds = "fci"});
         return draw.call("where.self", {ref(draw.partner(self, "b")), ref(self), ref(draw.partner(self, "f"))});
       }},
      {"where.ScalarOther",
       [](Draw& draw) {
         const int self = draw.value({});
         return draw.call("where.ScalarOther", {ref(draw.partner(self, "b")), ref(self), num(draw.coefficient())});
       }},
      {"masked_fill.Scalar",
       [](Draw& draw) {
         const auto write = draw.chance(35) ? draw.target({.kinds = "fc"}) : std::nullopt;
         const int self = write ? *write : draw.value({.kinds = "fc"});
         return draw.call(write ? "masked_fill_.Scalar" : "masked_fill.Scalar",
                          {ref(self), ref(draw.partner(self, "b")), num(draw.coefficient())});
       }},
      {"threshold",
       [](Draw& draw) {
         return draw.call("threshold", {ref(draw.value({})), num(draw.coefficient()), num(draw.coefficient())});
       }},
      {"polygamma",
       [](Draw& draw) {
         return draw.call("polygamma", {num(int64_t{1}), ref(draw.value({.low = 0.5, .high = 5}))});
       }},
      {"div.Tensor_mode",
       [](Draw& draw) {
         const int self = draw.value({.kinds = "fi"});
         return draw.call("div.Tensor_mode", {ref(self), ref(draw.partner(self, "fi", 0.3, 50)),
                                              word(draw.chance(50) ? "floor" : "trunc")});
       }},
      {"glu",
       [](Draw& draw) {
         const int self = draw.value({.min_dim = 1});
         return draw.call("glu", {ref(self), num(draw.dim_of(self))});
       }},
  };
}

std::vector<Row> conversions() {
  return {
      {"to.dtype",
       [](Draw& draw) {
         const int self = draw.value({.kinds = "fib"});
         return draw.call("to.dtype", {ref(self), type_arg(draw.type_of(draw.one_of(std::string("ffffib"))))});
       }},
      {"_to_copy",
       [](Draw& draw) {
         return draw.call("_to_copy", {ref(draw.value({.kinds = "fib"})),
                                       type_arg(draw.type_of(draw.one_of(std::string("fffcib"))))});
       }},
      {"clone", [](Draw& draw) { return draw.call("clone", {ref(draw.value({.kinds = "fcib"}))}); }},
      {"contiguous", [](Draw& draw) { return draw.call("contiguous", {ref(draw.value({.kinds = "fci"}))}); }},
      {"zeros_like", [](Draw& draw) { return draw.call("zeros_like", {ref(draw.value({.kinds = "fib"}))}); }},
      {"ones_like", [](Draw& draw) { return draw.call("ones_like", {ref(draw.value({.kinds = "fib"}))}); }},
      {"full_like",
       [](Draw& draw) {
         return draw.call("full_like", {ref(draw.value({.kinds = "f"})), num(draw.coefficient())});
       }},
      {"new_zeros",
       [](Draw& draw) {
         return draw.call("new_zeros", {ref(draw.value({.kinds = "f"})), ints(draw.some_sizes(1, 3, true))});
       }},
      {"new_full",
       [](Draw& draw) {
         return draw.call("new_full", {ref(draw.value({.kinds = "f"})), ints(draw.some_sizes(1, 3, true)), num(1.5)});
       }},
  };
}

std::vector<Row> foreach_rows() {
  const auto list = [](Draw& draw) {
    return std::vector<int>{draw.value({}), draw.value({}), draw.value({.max_dim = 2})};
  };
  return {
      {"_foreach_mul.Scalar",
       [=](Draw& draw) {
         return draw.call("_foreach_mul.Scalar", {refs(list(draw)), num(draw.coefficient())});
       }},
      {"_foreach_add.List",
       [=](Draw& draw) {
         const auto mine = list(draw);
         std::vector<int> others;
         others.reserve(mine.size());
         for (const int id : mine) others.push_back(draw.partner(id, "f"));
         return draw.call("_foreach_add.List", {refs(mine), refs(others)});
       }},
      {"_foreach_neg", [=](Draw& draw) { return draw.call("_foreach_neg", {refs(list(draw))}); }},
      {"_foreach_sigmoid", [=](Draw& draw) { return draw.call("_foreach_sigmoid", {refs(list(draw))}); }},
      {"_foreach_mul_.Scalar",
       [](Draw& draw) {
         const auto first = draw.target({});
         const auto second = draw.target({});
         if (!first || !second) return false;
         return draw.call("_foreach_mul_.Scalar", {refs({*first, *second}), num(draw.coefficient())});
       }},
  };
}

}  // namespace

std::vector<Family> pointwise_families() {
  Family unaries{"unary", 13, {}}, binaries{"binary", 16, {}}, scalars{"with a scalar", 7, {}};
  for (const auto& one : kUnaries) unaries.rows.push_back(unary(one));
  for (const auto& one : kBinaries) binaries.rows.push_back(binary(one));
  for (const auto& one : with_scalars()) scalars.rows.push_back(with_scalar(one));
  return {unaries,
          binaries,
          scalars,
          {"ternary", 5, ternaries()},
          {"conversion", 7, conversions()},
          {"foreach", 2, foreach_rows()}};
}

}  // namespace tessera::testing
