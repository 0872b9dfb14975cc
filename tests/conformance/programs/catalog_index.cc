// Operations that read and write by position, join tensors, or pad.
#include "tests/conformance/programs/catalog.h"

namespace tessera::testing {

namespace {

const char* const kAll = "fcib";

// Returns a tensor with a dim that has elements, and this dim.
std::pair<int, int64_t> with_dim(Draw& draw, const std::string& kinds) {
  const int self = draw.value({.kinds = kinds, .min_dim = 1, .empty = false});
  return {self, draw.dim_of(self)};
}

std::vector<int64_t> with_size(std::vector<int64_t> sizes, int64_t dim, int64_t size) {
  sizes[dim < 0 ? dim + static_cast<int64_t>(sizes.size()) : dim] = size;
  return sizes;
}

// Returns an operand, and whether the operation writes to it in place.
std::pair<int, bool> maybe_target(Draw& draw, const Wish& wish) {
  const auto write = draw.chance(35) ? draw.target(wish) : std::nullopt;
  return {write ? *write : draw.value(wish), write.has_value()};
}

std::vector<Row> reading() {
  return {
      {"index_select",
       [](Draw& draw) {
         const auto [self, dim] = with_dim(draw, kAll);
         const int index = draw.indices({draw.between(0, 5)}, draw.tensor(self).size(dim), false);
         return draw.call("index_select", {ref(self), num(dim), ref(index)});
       }},
      {"gather",
       [](Draw& draw) {
         const auto [self, dim] = with_dim(draw, "fci");
         const auto sizes = with_size(draw.sizes_of(self), dim, draw.between(0, 4));
         return draw.call("gather",
                          {ref(self), num(dim), ref(draw.indices(sizes, draw.tensor(self).size(dim), false))});
       }},
      {"take_along_dim",
       [](Draw& draw) {
         const auto [self, dim] = with_dim(draw, "fi");
         const auto sizes = with_size(draw.sizes_of(self), dim, draw.between(1, 4));
         return draw.call("take_along_dim",
                          {ref(self), ref(draw.indices(sizes, draw.tensor(self).size(dim), false)), num(dim)});
       }},
      {"take",
       [](Draw& draw) {
         const int self = draw.value({.kinds = "fi", .empty = false});
         return draw.call("take",
                          {ref(self), ref(draw.indices({draw.between(0, 5)}, draw.tensor(self).numel(), false))});
       }},
      {"index.Tensor",
       [](Draw& draw) {
         const int self = draw.value({.kinds = "fci", .min_dim = 1, .empty = false});
         const auto sizes = draw.sizes_of(self);
         const int64_t count = draw.between(0, 4);
         std::vector<Arg> list;
         for (size_t d = 0; d < sizes.size() && d < 2; ++d) {
           list.push_back(d == 0 && sizes.size() > 1 && draw.chance(40) ? none()
                                                                        : ref(draw.indices({count}, sizes[d], false)));
         }
         return draw.call("index.Tensor", {ref(self), {Arg::List(list)}});
       }},
      {"embedding",
       [](Draw& draw) {
         const int table = draw.value({.min_dim = 2, .max_dim = 2, .empty = false});
         return draw.call(
             "embedding",
             {ref(table), ref(draw.indices(draw.some_sizes(1, 2, true), draw.tensor(table).size(0), false))});
       }},
      {"bucketize.Tensor",
       [](Draw& draw) {
         const int bounds = draw.value({.min_dim = 1, .max_dim = 1, .also = [](const at::Tensor& t) {
                                          return t.numel() < 2 || (t.diff() > 0).all().item<bool>();
                                        }});
         if (!draw.call("sort.stable", {ref(bounds), flag(true)})) return false;
         const int sorted = draw.last_results()[0];
         return draw.call("bucketize.Tensor", {ref(draw.value({})), ref(sorted)});
       }},
      {"diag_embed",
       [](Draw& draw) {
         return draw.call("diag_embed", {ref(draw.value({.min_dim = 1, .max_dim = 2})), num(draw.between(-1, 1))});
       }},
      {"diag",
       [](Draw& draw) {
         return draw.call("diag", {ref(draw.value({.min_dim = 1, .max_dim = 2})), num(draw.between(-1, 1))});
       }},
      {"trace", [](Draw& draw) { return draw.call("trace", {ref(draw.value({.min_dim = 2, .max_dim = 2}))}); }},
  };
}

std::vector<Row> moving() {
  return {
      {"tril",
       [](Draw& draw) {
         const auto [self, write] = maybe_target(draw, {.kinds = "fci", .min_dim = 2});
         return draw.call(write ? "tril_" : "tril", {ref(self), num(draw.between(-1, 2))});
       }},
      {"triu",
       [](Draw& draw) {
         const auto [self, write] = maybe_target(draw, {.kinds = "fci", .min_dim = 2});
         return draw.call(write ? "triu_" : "triu", {ref(self), num(draw.between(-1, 2))});
       }},
      {"roll",
       [](Draw& draw) {
         const int self = draw.value({.kinds = kAll, .min_dim = 1});
         return draw.call(
             "roll", {ref(self), ints({draw.between(-3, 4)}), draw.chance(70) ? ints({draw.dim_of(self)}) : ints({})});
       }},
      {"flip",
       [](Draw& draw) {
         const int self = draw.value({.kinds = kAll, .min_dim = 1});
         return draw.call("flip", {ref(self), ints({draw.dim_of(self)})});
       }},
      {"rot90",
       [](Draw& draw) {
         return draw.call("rot90",
                          {ref(draw.value({.kinds = "fi", .min_dim = 2})), num(draw.between(0, 3)), ints({0, 1})});
       }},
      {"repeat",
       [](Draw& draw) {
         const int self = draw.value({.kinds = "fci"});
         std::vector<int64_t> times;
         for (int64_t i = draw.chance(30) ? -1 : 0; i < draw.tensor(self).dim(); ++i) {
           times.push_back(draw.between(1, 2));
         }
         return draw.call("repeat", {ref(self), ints(times)});
       }},
      {"tile",
       [](Draw& draw) {
         return draw.call("tile", {ref(draw.value({.kinds = "fi"})), ints({draw.between(1, 3)})});
       }},
      {"repeat_interleave.self_int",
       [](Draw& draw) {
         const int self = draw.value({.kinds = "fi", .min_dim = 1});
         return draw.call("repeat_interleave.self_int", {ref(self), num(draw.between(1, 3)), num(draw.dim_of(self))});
       }},
      {"cat",
       [](Draw& draw) {
         const int self = draw.value({.kinds = kAll, .min_dim = 1});
         const int64_t dim = draw.dim_of(self);
         const auto sizes = draw.sizes_of(self);
         std::vector<int> list{self};
         for (int64_t i = draw.between(1, 2); i > 0; --i) {
           list.push_back(draw.value(
               {.kinds = "fi", .sizes = draw.chance(50) ? sizes : with_size(sizes, dim, draw.between(0, 3))}));
         }
         return draw.call("cat", {refs(list), num(dim)});
       }},
      {"stack",
       [](Draw& draw) {
         const int self = draw.value({.kinds = kAll, .max_dim = 3});
         const Wish wish{.kinds = "fi", .sizes = draw.sizes_of(self)};
         return draw.call("stack", {refs({self, draw.value(wish), draw.value(wish)}),
                                    num(draw.between(-1, draw.tensor(self).dim()))});
       }},
      {"hstack",
       [](Draw& draw) {
         const int self = draw.value({.min_dim = 1});
         return draw.call("hstack", {refs({self, draw.value({.sizes = draw.sizes_of(self)})})});
       }},
      {"vstack",
       [](Draw& draw) {
         const int self = draw.value({});
         return draw.call("vstack", {refs({self, draw.value({.sizes = draw.sizes_of(self)})})});
       }},
      {"constant_pad_nd",
       [](Draw& draw) {
         const int self = draw.value({.kinds = "fi", .min_dim = 1});
         std::vector<int64_t> pad{draw.between(-1, 2), draw.between(0, 2)};
         if (draw.tensor(self).dim() > 1 && draw.chance(50)) {
           pad.insert(pad.end(), {draw.between(0, 2), draw.between(-1, 1)});
         }
         return draw.call("constant_pad_nd", {ref(self), ints(pad), num(0.5)});
       }},
  };
}

std::vector<Row> writing() {
  return {
      {"index_add",
       [](Draw& draw) {
         const auto [self, write] = maybe_target(draw, {.kinds = "fi", .min_dim = 1, .empty = false});
         const int64_t dim = draw.dim_of(self);
         const int64_t count = draw.between(1, 4);
         const int index = draw.indices({count}, draw.tensor(self).size(dim), false);
         const std::string kinds = draw.tensor(self).is_floating_point() ? "f" : "i";
         const int source = draw.value({.kinds = kinds, .sizes = with_size(draw.sizes_of(self), dim, count)});
         return draw.call(write ? "index_add_" : "index_add",
                          {ref(self), num(dim), ref(index), ref(source), num(draw.between(1, 2))});
       }},
      {"index_copy",
       [](Draw& draw) {
         const auto [self, write] = maybe_target(draw, {.min_dim = 1, .empty = false});
         const int64_t dim = draw.dim_of(self);
         const int64_t count = draw.tensor(self).size(dim);
         const int index = draw.indices({count}, count, true);
         const int source = draw.value({.sizes = draw.sizes_of(self)});
         return draw.call(write ? "index_copy_" : "index_copy", {ref(self), num(dim), ref(index), ref(source)});
       }},
      {"index_fill.int_Scalar",
       [](Draw& draw) {
         const auto [self, write] = maybe_target(draw, {.kinds = "f", .min_dim = 1, .empty = false});
         const int64_t dim = draw.dim_of(self);
         const int index = draw.indices({draw.between(0, 3)}, draw.tensor(self).size(dim), false);
         return draw.call(write ? "index_fill_.int_Scalar" : "index_fill.int_Scalar",
                          {ref(self), num(dim), ref(index), num(draw.coefficient())});
       }},
      {"index_put",
       [](Draw& draw) {
         const auto [self, write] = maybe_target(draw, {.min_dim = 1, .empty = false});
         const auto sizes = draw.sizes_of(self);
         const bool accumulate = draw.chance(50);
         const int64_t count = accumulate ? draw.between(1, 4) : sizes[0];
         const int index = draw.indices({count}, sizes[0], !accumulate);
         const int values = draw.value({.sizes = with_size(sizes, 0, count)});
         return draw.call(write ? "index_put_" : "index_put",
                          {ref(self), {Arg::List{ref(index)}}, ref(values), flag(accumulate)});
       }},
      {"scatter.src",
       [](Draw& draw) {
         const auto [self, write] = maybe_target(draw, {.min_dim = 1, .max_dim = 1, .empty = false});
         const int64_t count = draw.tensor(self).size(0);
         const int index = draw.indices({count}, count, true);
         return draw.call(write ? "scatter_.src" : "scatter.src",
                          {ref(self), num(int64_t{0}), ref(index), ref(draw.value({.sizes = draw.sizes_of(self)}))});
       }},
      {"scatter.value",
       [](Draw& draw) {
         const auto [self, write] = maybe_target(draw, {.kinds = "fi", .min_dim = 1, .empty = false});
         const int64_t dim = draw.dim_of(self);
         const int index =
             draw.indices(with_size(draw.sizes_of(self), dim, draw.between(1, 2)), draw.tensor(self).size(dim), false);
         return draw.call(write ? "scatter_.value" : "scatter.value",
                          {ref(self), num(dim), ref(index), num(int64_t{2})});
       }},
      {"scatter_add",
       [](Draw& draw) {
         const auto [self, write] = maybe_target(draw, {.min_dim = 1, .empty = false});
         const int64_t dim = draw.dim_of(self);
         const auto sizes = with_size(draw.sizes_of(self), dim, draw.between(1, 3));
         const int index = draw.indices(sizes, draw.tensor(self).size(dim), false);
         return draw.call(write ? "scatter_add_" : "scatter_add",
                          {ref(self), num(dim), ref(index), ref(draw.value({.sizes = sizes}))});
       }},
      {"scatter_reduce.two",
       [](Draw& draw) {
         const int self = draw.value({.min_dim = 1, .empty = false});
         const int64_t dim = draw.dim_of(self);
         const auto sizes = with_size(draw.sizes_of(self), dim, draw.between(1, 3));
         const int index = draw.indices(sizes, draw.tensor(self).size(dim), false);
         const char* how = draw.one_of(std::vector<const char*>{"sum", "amax", "amin", "mean"});
         return draw.call("scatter_reduce.two",
                          {ref(self), num(dim), ref(index), ref(draw.value({.sizes = sizes})), word(how)});
       }},
      {"select_scatter",
       [](Draw& draw) {
         const auto [self, dim] = with_dim(draw, "f");
         auto sizes = draw.sizes_of(self);
         const int64_t index = draw.below(draw.tensor(self).size(dim));
         sizes.erase(sizes.begin() + (dim < 0 ? dim + static_cast<int64_t>(sizes.size()) : dim));
         return draw.call("select_scatter", {ref(self), ref(draw.value({.sizes = sizes})), num(dim), num(index)});
       }},
      {"slice_scatter",
       [](Draw& draw) {
         const auto [self, dim] = with_dim(draw, "f");
         const int64_t size = draw.tensor(self).size(dim);
         const int64_t from = draw.below(size);
         const int64_t to = draw.between(from, size);
         const int source = draw.value({.sizes = with_size(draw.sizes_of(self), dim, to - from)});
         return draw.call("slice_scatter", {ref(self), ref(source), num(dim), num(from), num(to)});
       }},
      {"diagonal_scatter",
       [](Draw& draw) {
         const int self = draw.value({.min_dim = 2, .max_dim = 2, .empty = false});
         const auto sizes = draw.sizes_of(self);
         return draw.call("diagonal_scatter",
                          {ref(self), ref(draw.value({.sizes = std::vector<int64_t>{std::min(sizes[0], sizes[1])}}))});
       }},
      {"masked_scatter",
       [](Draw& draw) {
         const int self = draw.value({});
         const int mask = draw.value({.kinds = "b", .sizes = draw.sizes_of(self)});
         return draw.call("masked_scatter", {ref(self), ref(mask), ref(draw.value({.sizes = draw.sizes_of(self)}))});
       }},
  };
}

// Operations on integers that are class numbers. The sizes of some results depend on values.
std::vector<Row> of_classes() {
  return {
      {"one_hot",
       [](Draw& draw) {
         const int64_t classes = draw.between(1, 5);
         const int indices = draw.indices(draw.some_sizes(0, 3, true), classes, false);
         const bool inferred = draw.tensor(indices).numel() > 0 && draw.chance(40);
         return draw.call("one_hot", {ref(indices), num(inferred ? int64_t{-1} : classes + draw.below(2))});
       }},
      {"bincount",
       [](Draw& draw) {
         const int indices = draw.indices({draw.extent()}, draw.between(1, 6), false);
         const Arg weights = draw.chance(50) ? ref(draw.value({.sizes = draw.sizes_of(indices)})) : none();
         return draw.call("bincount", {ref(indices), weights, num(draw.between(0, 7))});
       }},
  };
}

}  // namespace

std::vector<Family> class_families() { return {{"classes", 8, of_classes()}}; }

std::vector<Family> index_families() {
  return {{"reading", 7, reading()}, {"moving", 9, moving()}, {"writing by position", 7, writing()}};
}

}  // namespace tessera::testing
