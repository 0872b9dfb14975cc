// Views, and operations that return a view or a copy.
#include <algorithm>
#include <numeric>

#include "tests/conformance/programs/catalog.h"

namespace tessera::testing {

namespace {

const char* const kAll = "fcib";

// Returns other sizes with the same number of elements: one dim is split or two are joined.
std::vector<int64_t> other_sizes(Draw& draw, std::vector<int64_t> sizes) {
  if (sizes.size() >= 2 && draw.chance(55)) {
    const auto at = draw.below(static_cast<int64_t>(sizes.size()) - 1);
    sizes[at] *= sizes[at + 1];
    sizes.erase(sizes.begin() + at + 1);
    return sizes;
  }
  if (sizes.empty()) return {1};
  const auto at = draw.below(static_cast<int64_t>(sizes.size()));
  std::vector<int64_t> factors{1};
  for (int64_t f = 2; f <= sizes[at]; ++f) {
    if (sizes[at] % f == 0) factors.push_back(f);
  }
  const int64_t factor = draw.one_of(factors);
  sizes[at] /= factor;
  sizes.insert(sizes.begin() + at, factor);
  return sizes;
}

std::vector<int64_t> order(Draw& draw, int64_t dims) {
  std::vector<int64_t> order(dims);
  std::iota(order.begin(), order.end(), 0);
  for (int64_t i = dims - 1; i > 0; --i) std::swap(order[i], order[draw.below(i + 1)]);
  return order;
}

std::vector<Row> shapes() {
  return {
      {"view",
       [](Draw& draw) {
         const int self = draw.value({.kinds = kAll, .also = [](const at::Tensor& t) { return t.is_contiguous(); }});
         auto sizes = other_sizes(draw, draw.sizes_of(self));
         if (draw.chance(20)) sizes = {-1};
         return draw.call("view", {ref(self), ints(sizes)});
       }},
      {"reshape",
       [](Draw& draw) {
         const int self = draw.value({.kinds = kAll});
         return draw.call("reshape", {ref(self), ints(other_sizes(draw, draw.sizes_of(self)))});
       }},
      {"flatten.using_ints",
       [](Draw& draw) {
         const int self = draw.value({.kinds = kAll, .min_dim = 1});
         const int64_t first = draw.below(draw.tensor(self).dim());
         return draw.call("flatten.using_ints",
                          {ref(self), num(first), num(draw.between(first, draw.tensor(self).dim() - 1))});
       }},
      {"ravel", [](Draw& draw) { return draw.call("ravel", {ref(draw.value({.kinds = kAll}))}); }},
      {"unflatten.int",
       [](Draw& draw) {
         const int self = draw.value({.kinds = kAll, .min_dim = 1});
         const int64_t dim = draw.dim_of(self);
         const int64_t size = draw.tensor(self).size(dim);
         const int64_t part = size % 3 == 0 ? 3 : size % 2 == 0 ? 2 : 1;
         return draw.call("unflatten.int",
                          {ref(self), num(dim), draw.chance(50) ? ints({part, -1}) : ints({-1, part})});
       }},
      {"expand",
       [](Draw& draw) {
         const int self = draw.value({.kinds = kAll, .also = [](const at::Tensor& t) {
                                        return t.dim() == 0 || std::ranges::count(t.sizes(), 1) > 0;
                                      }});
         auto sizes = draw.sizes_of(self);
         for (auto& size : sizes) size = size == 1 && draw.chance(70) ? draw.between(2, 5) : size;
         if (draw.chance(40)) sizes.insert(sizes.begin(), draw.between(1, 4));
         return draw.call("expand", {ref(self), ints(sizes)});
       }},
      {"expand_as",
       [](Draw& draw) {
         const int other = draw.value({.kinds = kAll});
         return draw.call("expand_as", {ref(draw.partner(other, "f")), ref(other)});
       }},
      {"alias", [](Draw& draw) { return draw.call("alias", {ref(draw.value({.kinds = kAll}))}); }},
      {"detach", [](Draw& draw) { return draw.call("detach", {ref(draw.value({.kinds = kAll}))}); }},
      {"view_as_real",
       [](Draw& draw) {
         const int self = draw.value({.kinds = "c", .also = [](const at::Tensor& t) { return !t.is_conj(); }});
         return draw.call("view_as_real", {ref(self)});
       }},
      {"conj, resolved",
       [](Draw& draw) {
         return draw.call("conj", {ref(draw.value({.kinds = "c"}))}) &&
                draw.call("resolve_conj", {ref(draw.last_results()[0])}) &&
                draw.call("view_as_real", {ref(draw.last_results()[0])});
       }},
      {"view_as_complex",
       [](Draw& draw) {
         const int self = draw.value({.min_dim = 1, .also = [](const at::Tensor& t) { return t.size(-1) == 2; }});
         if (draw.tensor(self).size(-1) != 2) return false;
         return draw.call("view_as_complex", {ref(self)});
       }},
  };
}

std::vector<Row> permutations() {
  return {
      {"transpose.int",
       [](Draw& draw) {
         const int self = draw.value({.kinds = kAll, .min_dim = 2});
         return draw.call("transpose.int", {ref(self), num(draw.dim_of(self)), num(draw.dim_of(self))});
       }},
      {"permute",
       [](Draw& draw) {
         const int self = draw.value({.kinds = kAll, .min_dim = 2});
         return draw.call("permute", {ref(self), ints(order(draw, draw.tensor(self).dim()))});
       }},
      {"movedim.int",
       [](Draw& draw) {
         const int self = draw.value({.kinds = kAll, .min_dim = 2});
         return draw.call("movedim.int", {ref(self), num(draw.dim_of(self)), num(draw.dim_of(self))});
       }},
      {"swapaxes",
       [](Draw& draw) {
         const int self = draw.value({.kinds = kAll, .min_dim = 2});
         return draw.call("swapaxes", {ref(self), num(draw.dim_of(self)), num(draw.dim_of(self))});
       }},
      {"t", [](Draw& draw) { return draw.call("t", {ref(draw.value({.kinds = kAll, .max_dim = 2}))}); }},
      {"mT", [](Draw& draw) { return draw.call("mT", {ref(draw.value({.kinds = kAll, .min_dim = 2}))}); }},
      {"adjoint", [](Draw& draw) { return draw.call("adjoint", {ref(draw.value({.kinds = "fc", .min_dim = 2}))}); }},
      {"squeeze", [](Draw& draw) { return draw.call("squeeze", {ref(draw.value({.kinds = kAll}))}); }},
      {"squeeze.dim",
       [](Draw& draw) {
         const int self = draw.value({.kinds = kAll, .min_dim = 1});
         return draw.call("squeeze.dim", {ref(self), num(draw.dim_of(self))});
       }},
      {"squeeze.dims",
       [](Draw& draw) {
         const int self = draw.value({.kinds = kAll, .min_dim = 2});
         return draw.call("squeeze.dims", {ref(self), ints({0, 1})});
       }},
      {"unsqueeze",
       [](Draw& draw) {
         const int self = draw.value({.kinds = kAll});
         return draw.call("unsqueeze", {ref(self), num(draw.between(-1, draw.tensor(self).dim()))});
       }},
  };
}

std::vector<Row> parts() {
  return {
      {"select.int",
       [](Draw& draw) {
         const int self = draw.value({.kinds = kAll, .min_dim = 1, .empty = false});
         const int64_t dim = draw.dim_of(self);
         const int64_t size = draw.tensor(self).size(dim);
         return draw.call("select.int", {ref(self), num(dim), num(draw.between(-size, size - 1))});
       }},
      {"slice.Tensor",
       [](Draw& draw) {
         const int self = draw.value({.kinds = kAll, .min_dim = 1});
         const int64_t dim = draw.dim_of(self);
         const int64_t size = draw.tensor(self).size(dim);
         const int64_t from = draw.below(size + 1);
         return draw.call("slice.Tensor", {ref(self), num(dim), num(from), num(draw.between(from, size)),
                                           num(draw.chance(60) ? int64_t{1} : draw.between(2, 3))});
       }},
      {"narrow",
       [](Draw& draw) {
         const int self = draw.value({.kinds = kAll, .min_dim = 1});
         const int64_t dim = draw.dim_of(self);
         const int64_t size = draw.tensor(self).size(dim);
         const int64_t from = draw.below(size + 1);
         return draw.call("narrow", {ref(self), num(dim), num(from), num(draw.below(size - from + 1))});
       }},
      {"split.Tensor",
       [](Draw& draw) {
         const int self = draw.value({.kinds = kAll, .min_dim = 1});
         const int64_t dim = draw.dim_of(self);
         const int64_t size = draw.tensor(self).size(dim);
         return draw.call("split.Tensor", {ref(self), num(draw.between((size + 3) / 4, size) + (size == 0)), num(dim)});
       }},
      {"split_with_sizes",
       [](Draw& draw) {
         const int self = draw.value({.kinds = kAll, .min_dim = 1});
         const int64_t dim = draw.dim_of(self);
         const int64_t size = draw.tensor(self).size(dim);
         const int64_t first = draw.below(size + 1);
         return draw.call("split_with_sizes", {ref(self), ints({first, size - first}), num(dim)});
       }},
      {"chunk",
       [](Draw& draw) {
         const int self = draw.value({.kinds = kAll, .min_dim = 1});
         return draw.call("chunk", {ref(self), num(draw.between(1, 4)), num(draw.dim_of(self))});
       }},
      {"tensor_split.sections",
       [](Draw& draw) {
         const int self = draw.value({.kinds = kAll, .min_dim = 1});
         return draw.call("tensor_split.sections", {ref(self), num(draw.between(1, 4)), num(draw.dim_of(self))});
       }},
      {"unbind.int",
       [](Draw& draw) {
         const int self = draw.value({.kinds = kAll, .min_dim = 1});
         return draw.call("unbind.int", {ref(self), num(draw.dim_of(self))});
       }},
      {"diagonal",
       [](Draw& draw) {
         const int self = draw.value({.kinds = kAll, .min_dim = 2});
         return draw.call("diagonal", {ref(self), num(draw.between(-1, 1)), num(int64_t{0}), num(int64_t{1})});
       }},
      {"unfold",
       [](Draw& draw) {
         const int self = draw.value({.kinds = "f", .min_dim = 1, .empty = false});
         const int64_t dim = draw.dim_of(self);
         const int64_t size = draw.tensor(self).size(dim);
         return draw.call("unfold", {ref(self), num(dim), num(draw.between(1, std::min<int64_t>(size, 3))),
                                     num(draw.between(1, 3))});
       }},
  };
}

}  // namespace

std::vector<Family> view_families() {
  return {{"shape", 11, shapes()}, {"order of dims", 8, permutations()}, {"part", 11, parts()}};
}

}  // namespace tessera::testing
