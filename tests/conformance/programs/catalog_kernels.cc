// Our own operations. In double precision, which most programs have, our operations run as formulas of plain
// operations. The rules and derivatives are the same for every type.
#include "tests/conformance/programs/catalog.h"

namespace tessera::testing {

namespace {

// The operands of a kernel have one type.
Wish like(Draw& draw, int id, std::vector<int64_t> sizes) {
  const auto type = draw.tensor(id).scalar_type();
  return {.kinds = c10::isComplexType(type) ? "c" : "f",
          .low = -30,
          .high = 30,
          .sizes = std::move(sizes),
          .also = [type](const at::Tensor& tensor) { return tensor.scalar_type() == type; }};
}

Wish moderate(int64_t dims, bool empty = true) { return {.low = -30, .high = 30, .min_dim = dims, .empty = empty}; }

Wish moderate_or_complex(int64_t dims) {
  Wish wish = moderate(dims);
  wish.kinds = "fc";
  return wish;
}

int new_input(Draw& draw, const std::vector<int64_t>& sizes) {
  return draw.input(draw.type_of('f'), sizes, {}, draw.chance(70));
}

Row gate(const char* op) {
  return {op, [op](Draw& draw) {
            const int gate = draw.value(moderate(0));
            return draw.call(op, {ref(gate), ref(draw.value(like(draw, gate, draw.sizes_of(gate))))});
          }};
}

std::vector<Row> kernels() {
  return {
      gate("tessera::swiglu"),
      gate("tessera::geglu"),
      {"tessera::rms_norm",
       [](Draw& draw) {
         const int x = draw.value(moderate(1, /*empty=*/false));
         const int weight = draw.value(like(draw, x, {draw.tensor(x).size(-1)}));
         return draw.call("tessera::rms_norm", {ref(x), ref(weight), num(1e-5), flag(draw.chance(40))});
       }},
      {"tessera::linear",
       [](Draw& draw) {
         const int x = draw.value(moderate_or_complex(1));
         const int64_t outer = draw.extent();
         const int weight = draw.value(like(draw, x, {outer, draw.tensor(x).size(-1)}));
         return draw.call("tessera::linear",
                          {ref(x), ref(weight), draw.chance(50) ? ref(draw.value(like(draw, x, {outer}))) : none()});
       }},
      {"tessera::linear_weight_gradient",
       [](Draw& draw) {
         const int grad = draw.value(moderate_or_complex(2));
         auto sizes = draw.sizes_of(grad);
         sizes.back() = draw.extent();
         return draw.call("tessera::linear_weight_gradient", {ref(grad), ref(draw.value(like(draw, grad, sizes)))});
       }},
      {"tessera::rotary",
       [](Draw& draw) {
         auto sizes = draw.some_sizes(4, 4, true);
         const int64_t half = draw.between(1, 3);
         sizes[3] = 2 * half;
         const int x = new_input(draw, sizes);
         const std::vector<int64_t> angles{draw.chance(50) ? 1 : sizes[0], sizes[1], half};
         const int cos = draw.input(draw.tensor(x).scalar_type(), angles, {}, false);
         const int sin = draw.input(draw.tensor(x).scalar_type(), angles, {}, false);
         return draw.call("tessera::rotary", {ref(x), ref(cos), ref(sin), flag(draw.chance(30))});
       }},
      {"tessera::causal_attention",
       [](Draw& draw) {
         const auto sizes = draw.some_sizes(3, 3, true);
         const int64_t groups = draw.between(1, 4), heads = groups * draw.between(1, 2), tokens = sizes[1];
         const int q = new_input(draw, {sizes[0], heads, tokens, sizes[2]});
         const auto type = draw.tensor(q).scalar_type();
         const std::vector<int64_t> keys{sizes[0], groups, tokens, sizes[2]};
         const int k = draw.input(type, keys, {}, draw.chance(70)), v = draw.input(type, keys, {}, draw.chance(70));
         const Arg first =
             tokens > 0 && draw.chance(50) ? ref(draw.indices({sizes[0], tokens}, tokens, /*distinct=*/false)) : none();
         return draw.call("tessera::causal_attention", {ref(q), ref(k), ref(v), first, num(0.5)});
       }},
  };
}

}  // namespace

std::vector<Family> kernel_families() { return {{"kernels", 30, kernels()}}; }

}  // namespace tessera::testing
