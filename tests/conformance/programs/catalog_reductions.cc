// Reductions, scans, sorting, and losses, which end in a reduction.
#include <cmath>

#include "tests/conformance/programs/catalog.h"

namespace tessera::testing {

namespace {

Arg some_dims(Draw& draw, int self) {
  const int64_t dims = draw.tensor(self).dim();
  if (dims >= 2 && draw.chance(35)) return ints({0, dims - 1});
  return ints({draw.dim_of(self)});
}

// Whether no two values along `dim` are equal. With equal values the index of an extremum is not defined.
bool distinct_along(const at::Tensor& tensor, int64_t dim) {
  const at::NoGradGuard no_grad;
  const at::Tensor t = tensor.detach().to(at::kDouble);
  if (t.dim() == 0 || t.size(dim) < 2) return true;
  const at::Tensor sorted = std::get<0>(t.sort(dim));
  const at::Tensor gaps = sorted.narrow(dim, 1, t.size(dim) - 1) - sorted.narrow(dim, 0, t.size(dim) - 1);
  return gaps.numel() == 0 || gaps.min().item<double>() > 1e-6;
}

// op(self)
Row whole(const char* op, const char* kinds = "f", bool empty = true, double low = -1e4, double high = 1e4) {
  return {op, [=](Draw& draw) {
            return draw.call(op, {ref(draw.value({.kinds = kinds, .low = low, .high = high, .empty = empty}))});
          }};
}

// op(self, dims, keepdim)
Row over_dims(const char* op, const char* kinds = "f", bool empty = true) {
  return {op, [=](Draw& draw) {
            const int self = draw.value({.kinds = kinds, .min_dim = 1, .empty = empty});
            return draw.call(op, {ref(self), some_dims(draw, self), flag(draw.chance(50))});
          }};
}

// op(self, dim, keepdim)
Row over_dim(const char* op, const char* kinds = "f", bool distinct = false) {
  return {op, [=](Draw& draw) {
            const int self = draw.value({.kinds = kinds, .min_dim = 1, .empty = false});
            const int64_t dim = draw.dim_of(self);
            if (distinct && !distinct_along(draw.tensor(self), dim)) return false;
            return draw.call(op, {ref(self), num(dim), flag(draw.chance(50))});
          }};
}

// op(self, dim)
Row along_dim(const char* op, const char* kinds = "f", double low = -1e4, double high = 1e4, bool distinct = false) {
  return {op, [=](Draw& draw) {
            const int self = draw.value({.kinds = kinds, .low = low, .high = high, .min_dim = 1});
            const int64_t dim = draw.dim_of(self);
            if (distinct && !distinct_along(draw.tensor(self), dim)) return false;
            return draw.call(op, {ref(self), num(dim)});
          }};
}

// op(self, dims, correction, keepdim)
Row deviation(const char* op) {
  return {op, [=](Draw& draw) {
            const int self = draw.value({.min_dim = 1, .empty = false});
            return draw.call(op, {ref(self), some_dims(draw, self), num(draw.between(0, 1)), flag(draw.chance(50))});
          }};
}

std::vector<Row> reductions() {
  return {
      whole("sum", "fcib"),
      over_dims("sum.dim_IntList", "fcib"),
      whole("mean", "fc", false),
      over_dims("mean.dim", "fc", false),
      whole("nansum", "f"),
      whole("prod", "f", true, -2, 2),
      over_dim("prod.dim_int"),
      whole("any", "fib"),
      over_dim("any.dim", "fib"),
      over_dims("any.dims", "fib"),
      {"any.dim, counted",
       [](Draw& draw) {
         const int self = draw.value({.kinds = "b", .min_dim = 1, .empty = false});
         if (!draw.call("any.dim", {ref(self), num(draw.dim_of(self)), flag(draw.chance(50))})) return false;
         const int found = draw.last_results()[0];
         return draw.chance(50) ? draw.call("sum", {ref(found)})
                                : draw.call("to.dtype", {ref(found), type_arg(draw.type_of('f'))});
       }},
      whole("all", "fib"),
      over_dim("all.dim", "fib"),
      over_dims("amax", "fi", false),
      over_dims("amin", "fi", false),
      whole("max", "fi", false),
      whole("min", "fi", false),
      over_dim("max.dim", "fi"),
      over_dim("min.dim", "fi"),
      over_dim("argmax", "fi"),
      over_dim("argmin", "fi"),
      over_dims("logsumexp", "f", false),
      deviation("var.correction"),
      deviation("std.correction"),
      deviation("var_mean.correction"),
      deviation("std_mean.correction"),
      over_dim("median.dim", "f", true),
      over_dim("nanmedian.dim", "f", true),
      over_dims("count_nonzero.dim_IntList", "fib"),
      {"aminmax", [](Draw& draw) { return draw.call("aminmax", {ref(draw.value({.empty = false}))}); }},
      {"norm.Scalar",
       [](Draw& draw) {
         return draw.call("norm.Scalar", {ref(draw.value({.low = 0.1, .empty = false})), num(draw.between(1, 3))});
       }},
      {"linalg_vector_norm",
       [](Draw& draw) {
         const int self = draw.value({.low = 0.1, .min_dim = 1, .empty = false});
         return draw.call("linalg_vector_norm", {ref(self), num(draw.one_of(std::vector<double>{1, 2, 3, INFINITY})),
                                                 some_dims(draw, self), flag(draw.chance(50))});
       }},
      {"kthvalue",
       [](Draw& draw) {
         const int self = draw.value({.min_dim = 1, .empty = false});
         const int64_t dim = draw.dim_of(self);
         if (!distinct_along(draw.tensor(self), dim)) return false;
         return draw.call("kthvalue", {ref(self), num(draw.between(1, draw.tensor(self).size(dim))), num(dim)});
       }},
      {"histc",
       [](Draw& draw) {
         return draw.call("histc", {ref(draw.value({})), num(int64_t{5}), num(-1.9), num(2.3)});
       }},
  };
}

std::vector<Row> scans() {
  return {
      along_dim("cumsum", "fci"),
      along_dim("cumprod", "f", -2, 2),
      along_dim("cummax", "fi"),
      along_dim("cummin", "fi"),
      along_dim("logcumsumexp", "f", -20, 20),
      along_dim("softmax.int", "f", -20, 20),
      along_dim("log_softmax.int", "f", -20, 20),
      {"diff",
       [](Draw& draw) {
         const int self = draw.value({.min_dim = 1, .empty = false});
         return draw.call("diff", {ref(self), num(int64_t{1}), num(draw.dim_of(self))});
       }},
  };
}

std::vector<Row> sorting() {
  return {
      {"sort",
       [](Draw& draw) {
         const int self = draw.value({.kinds = "fi", .min_dim = 1});
         const int64_t dim = draw.dim_of(self);
         if (!distinct_along(draw.tensor(self), dim)) return false;
         return draw.call("sort", {ref(self), num(dim), flag(draw.chance(50))});
       }},
      {"sort.stable",
       [](Draw& draw) {
         const int self = draw.value({.kinds = "fib", .min_dim = 1});
         return draw.call("sort.stable", {ref(self), flag(true), num(draw.dim_of(self)), flag(draw.chance(50))});
       }},
      {"argsort.stable",
       [](Draw& draw) {
         const int self = draw.value({.kinds = "fi", .min_dim = 1});
         return draw.call("argsort.stable", {ref(self), flag(true), num(draw.dim_of(self)), flag(draw.chance(50))});
       }},
      {"topk",
       [](Draw& draw) {
         const int self = draw.value({.kinds = "fi", .min_dim = 1});
         const int64_t dim = draw.dim_of(self);
         if (!distinct_along(draw.tensor(self), dim)) return false;
         return draw.call(
             "topk", {ref(self), num(draw.below(draw.tensor(self).size(dim) + 1)), num(dim), flag(draw.chance(50))});
       }},
      {"msort", [](Draw& draw) { return draw.call("msort", {ref(draw.value({.kinds = "fi", .min_dim = 1}))}); }},
  };
}

// op(self, target, reduction)
Row loss(const char* op) {
  return {op, [=](Draw& draw) {
            const int self = draw.value({});
            const int target = draw.value({.sizes = draw.sizes_of(self)});
            return draw.call(op, {ref(self), ref(target), num(draw.between(0, 2))});
          }};
}

std::vector<Row> losses() {
  return {
      loss("mse_loss"),
      loss("l1_loss"),
      loss("smooth_l1_loss"),
      loss("huber_loss"),
      loss("soft_margin_loss"),
      {"binary_cross_entropy",
       [](Draw& draw) {
         const int self = draw.value({.low = 0.1, .high = 0.9});
         const int target = draw.value({.low = 0, .high = 1, .sizes = draw.sizes_of(self)});
         return draw.call("binary_cross_entropy", {ref(self), ref(target), none(), num(draw.between(0, 2))});
       }},
      {"binary_cross_entropy_with_logits",
       [](Draw& draw) {
         const int self = draw.value({.low = -20, .high = 20});
         const int target = draw.value({.low = 0, .high = 1, .sizes = draw.sizes_of(self)});
         return draw.call("binary_cross_entropy_with_logits",
                          {ref(self), ref(target), none(), none(), num(draw.between(0, 2))});
       }},
      {"cross_entropy_loss",
       [](Draw& draw) {
         const int self = draw.value({.low = -20, .high = 20, .min_dim = 2, .max_dim = 2, .empty = false});
         const auto sizes = draw.sizes_of(self);
         const int target = draw.indices({sizes[0]}, sizes[1], false);
         return draw.call("cross_entropy_loss", {ref(self), ref(target), none(), num(draw.between(0, 2))});
       }},
      {"nll_loss",
       [](Draw& draw) {
         const int self = draw.value({.min_dim = 2, .max_dim = 2, .empty = false});
         const auto sizes = draw.sizes_of(self);
         const int target = draw.indices({sizes[0]}, sizes[1], false);
         return draw.call("nll_loss", {ref(self), ref(target), none(), num(draw.between(0, 2))});
       }},
      {"layer_norm",
       [](Draw& draw) {
         const int self = draw.value({.min_dim = 1, .empty = false});
         const int64_t size = draw.tensor(self).size(-1);
         const Wish wish{.sizes = std::vector<int64_t>{size}};
         return draw.call("layer_norm", {ref(self), ints({size}), draw.chance(60) ? ref(draw.value(wish)) : none(),
                                         none(), num(0.1)});
       }},
      {"rms_norm",
       [](Draw& draw) {
         const int self = draw.value({.min_dim = 1, .empty = false});
         const int64_t size = draw.tensor(self).size(-1);
         const Wish wish{.sizes = std::vector<int64_t>{size}};
         return draw.call("rms_norm",
                          {ref(self), ints({size}), draw.chance(60) ? ref(draw.value(wish)) : none(), num(0.1)});
       }},
      {"kl_div",
       [](Draw& draw) {
         const int self = draw.value({.low = -9, .high = 0});
         const int target = draw.value({.low = 0.1, .high = 1, .sizes = draw.sizes_of(self)});
         return draw.call("kl_div", {ref(self), ref(target), num(draw.between(0, 2))});
       }},
  };
}

// Operations whose result is no tensor.
std::vector<Row> numbers() {
  return {
      {"equal",
       [](Draw& draw) {
         const int self = draw.value({.kinds = "fi"});
         return draw.call("equal", {ref(self), ref(draw.value({.kinds = "fi", .sizes = draw.sizes_of(self)}))});
       }},
      {"item",
       [](Draw& draw) {
         const int self = draw.value({.kinds = "fib", .also = [](const at::Tensor& t) { return t.numel() == 1; }});
         return draw.tensor(self).numel() == 1 && draw.call("item", {ref(self)});
       }},
  };
}

}  // namespace

std::vector<Family> reduction_families() {
  return {{"reduction", 15, reductions()},
          {"scan", 5, scans()},
          {"sorting", 5, sorting()},
          {"loss", 4, losses()},
          {"number", 1, numbers()}};
}

}  // namespace tessera::testing
