// Products of matrices and vectors.
#include "tests/conformance/programs/catalog.h"

namespace tessera::testing {

namespace {

// A matrix or vector of numbers that are small enough for products of products.
Wish factor(const std::string& kinds, std::optional<std::vector<int64_t>> sizes = std::nullopt, int64_t dims = 2) {
  return {.kinds = kinds, .low = -30, .high = 30, .min_dim = dims, .max_dim = dims, .sizes = std::move(sizes)};
}

std::string kind(Draw& draw) { return draw.chance(88) ? "f" : "c"; }

std::vector<Row> products() {
  return {
      {"mm",
       [](Draw& draw) {
         const auto kinds = kind(draw);
         const int a = draw.value(factor(kinds));
         return draw.call("mm", {ref(a), ref(draw.value(factor(kinds, {{draw.tensor(a).size(1), draw.extent()}})))});
       }},
      {"bmm",
       [](Draw& draw) {
         const auto kinds = kind(draw);
         const int a = draw.value(factor(kinds, std::nullopt, 3));
         const auto sizes = draw.sizes_of(a);
         return draw.call("bmm", {ref(a), ref(draw.value(factor(kinds, {{sizes[0], sizes[2], draw.extent()}}, 3)))});
       }},
      {"matmul",
       [](Draw& draw) {
         const int a = draw.value({.low = -30, .high = 30, .min_dim = 1});
         const int64_t inner = draw.tensor(a).size(-1);
         const auto other = draw.chance(25) ? std::vector<int64_t>{inner} : std::vector<int64_t>{inner, draw.extent()};
         return draw.call("matmul", {ref(a), ref(draw.value({.low = -30, .high = 30, .sizes = other}))});
       }},
      {"matmul",
       [](Draw& draw) {
         const int b = draw.value({.low = -30, .high = 30, .min_dim = 2});
         const auto sizes = draw.sizes_of(b);
         std::vector<int64_t> other{draw.extent(), sizes[sizes.size() - 2]};
         if (draw.chance(50)) other.insert(other.begin(), sizes.size() > 2 ? sizes[sizes.size() - 3] : draw.extent());
         return draw.call("matmul", {ref(draw.value({.low = -30, .high = 30, .sizes = other})), ref(b)});
       }},
      {"linear",
       [](Draw& draw) {
         const int x = draw.value({.low = -30, .high = 30, .min_dim = 1});
         const int64_t inner = draw.tensor(x).size(-1);
         const int64_t outer = draw.extent();
         const int w = draw.value(factor("f", {{outer, inner}}));
         return draw.call("linear",
                          {ref(x), ref(w), draw.chance(60) ? ref(draw.value(factor("f", {{outer}}, 1))) : none()});
       }},
      {"mv",
       [](Draw& draw) {
         const int a = draw.value(factor("f"));
         return draw.call("mv", {ref(a), ref(draw.value(factor("f", {{draw.tensor(a).size(1)}}, 1)))});
       }},
      {"dot",
       [](Draw& draw) {
         const auto kinds = kind(draw);
         const int a = draw.value(factor(kinds, std::nullopt, 1));
         return draw.call(draw.chance(70) ? "dot" : "vdot",
                          {ref(a), ref(draw.value(factor(kinds, draw.sizes_of(a), 1)))});
       }},
      {"addmm",
       [](Draw& draw) {
         const int a = draw.value(factor("f"));
         const int64_t rows = draw.tensor(a).size(0);
         const int64_t columns = draw.extent();
         const int b = draw.value(factor("f", {{draw.tensor(a).size(1), columns}}));
         const auto write = draw.chance(30) ? draw.target(factor("f", {{rows, columns}})) : std::nullopt;
         const auto bias = draw.chance(50) ? std::vector<int64_t>{columns} : std::vector<int64_t>{rows, columns};
         const int self = write ? *write : draw.value({.sizes = bias});
         return draw.call(write ? "addmm_" : "addmm", {ref(self), ref(a), ref(b), num(draw.coefficient()), num(0.5)});
       }},
      {"baddbmm",
       [](Draw& draw) {
         const int a = draw.value(factor("f", std::nullopt, 3));
         const auto sizes = draw.sizes_of(a);
         const int64_t columns = draw.extent();
         const int b = draw.value(factor("f", {{sizes[0], sizes[2], columns}}, 3));
         const std::vector<int64_t> made{sizes[0], sizes[1], columns};
         const auto write = draw.chance(30) ? draw.target({.sizes = made}) : std::nullopt;
         return draw.call(write ? "baddbmm_" : "baddbmm",
                          {ref(write ? *write : draw.value({.sizes = made})), ref(a), ref(b)});
       }},
      {"addbmm",
       [](Draw& draw) {
         const int a = draw.value(factor("f", std::nullopt, 3));
         const auto sizes = draw.sizes_of(a);
         const int64_t columns = draw.extent();
         const int b = draw.value(factor("f", {{sizes[0], sizes[2], columns}}, 3));
         return draw.call("addbmm",
                          {ref(draw.value({.sizes = std::vector<int64_t>{sizes[1], columns}})), ref(a), ref(b)});
       }},
      {"addmv",
       [](Draw& draw) {
         const int a = draw.value(factor("f"));
         const auto sizes = draw.sizes_of(a);
         const int v = draw.value(factor("f", {{sizes[1]}}, 1));
         return draw.call("addmv", {ref(draw.value({.sizes = std::vector<int64_t>{sizes[0]}})), ref(a), ref(v)});
       }},
      {"addr",
       [](Draw& draw) {
         const int a = draw.value(factor("f", std::nullopt, 1));
         const int b = draw.value(factor("f", std::nullopt, 1));
         const std::vector<int64_t> made{draw.tensor(a).size(0), draw.tensor(b).size(0)};
         return draw.call("addr", {ref(draw.value({.sizes = made})), ref(a), ref(b)});
       }},
      {"outer",
       [](Draw& draw) {
         return draw.call(
             "outer", {ref(draw.value(factor("f", std::nullopt, 1))), ref(draw.value(factor("f", std::nullopt, 1)))});
       }},
      {"inner",
       [](Draw& draw) {
         const int a = draw.value({.low = -30, .high = 30, .min_dim = 1, .max_dim = 2});
         return draw.call("inner", {ref(a), ref(draw.value(factor("f", {{draw.extent(), draw.tensor(a).size(-1)}})))});
       }},
      {"kron",
       [](Draw& draw) {
         return draw.call("kron", {ref(draw.value(factor("f"))), ref(draw.value(factor("f")))});
       }},
      {"tensordot",
       [](Draw& draw) {
         const int a = draw.value({.low = -30, .high = 30, .min_dim = 2, .max_dim = 3});
         const int64_t inner = draw.tensor(a).size(1);
         const int b = draw.value(factor("f", {{inner, draw.extent()}}));
         return draw.call("tensordot", {ref(a), ref(b), ints({1}), ints({0})});
       }},
      {"einsum",
       [](Draw& draw) {
         const int a = draw.value(factor("f"));
         const int b = draw.value(factor("f", {{draw.tensor(a).size(1), draw.extent()}}));
         const char* how = draw.one_of(std::vector<const char*>{"ij,jk->ik", "ij,jk->ki", "ij,jk->i", "ij,jk->"});
         return draw.call("einsum", {word(how), refs({a, b})});
       }},
      {"linalg_cross",
       [](Draw& draw) {
         const int a = draw.value({.sizes = std::vector<int64_t>{draw.extent(), 3}});
         return draw.call("linalg_cross", {ref(a), ref(draw.value({.sizes = draw.sizes_of(a)}))});
       }},
      {"cosine_similarity",
       [](Draw& draw) {
         const int a = draw.value({.low = 0.1, .min_dim = 1, .empty = false});
         return draw.call("cosine_similarity",
                          {ref(a), ref(draw.value({.low = 0.1, .sizes = draw.sizes_of(a)})), num(draw.dim_of(a))});
       }},
  };
}

}  // namespace

std::vector<Family> product_families() { return {{"product", 11, products()}}; }

}  // namespace tessera::testing
