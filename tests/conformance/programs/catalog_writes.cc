// Operations that exist in place only: those that overwrite, and those that change only the shape.
#include "tests/conformance/programs/catalog.h"

namespace tessera::testing {

namespace {

Row in_place(const std::string& op, const Wish& wish, std::function<std::vector<Arg>(Draw&, int)> others) {
  return {op, [=](Draw& draw) {
            const auto self = draw.target(wish);
            if (!self) return false;
            std::vector<Arg> args{ref(*self)};
            for (auto& arg : others(draw, *self)) args.push_back(std::move(arg));
            return draw.call(op, args);
          }};
}

// A second operand that broadcasts to the target.
std::vector<Arg> with_partner(Draw& draw, int self) { return {ref(draw.partner(self, "f"))}; }
std::vector<Arg> with_number(Draw& draw, int) { return {num(draw.coefficient())}; }
std::vector<Arg> alone(Draw&, int) { return {}; }

// Takes a view and writes through it.
bool through_a_view(Draw& draw) {
  const auto base = draw.target({.min_dim = 1, .empty = false});
  if (!base) return false;
  const int64_t dim = draw.dim_of(*base);
  const int64_t size = draw.tensor(*base).size(dim);
  bool taken = false;
  switch (draw.below(5)) {
    case 0:
      taken = draw.call("select.int", {ref(*base), num(dim), num(draw.below(size))});
      break;
    case 1:
      taken = draw.call("slice.Tensor", {ref(*base), num(dim), num(draw.below(size)), num(size)});
      break;
    case 2:
      taken = draw.call("transpose.int", {ref(*base), num(dim), num(draw.dim_of(*base))});
      break;
    case 3:
      taken = draw.call("unsqueeze", {ref(*base), num(dim)});
      break;
    default:
      taken = draw.call("view", {ref(*base), ints({-1})});
      break;
  }
  if (!taken) return false;
  const int view = draw.last_results()[0];
  switch (draw.below(4)) {
    case 0:
      return draw.call("mul_.Scalar", {ref(view), num(draw.coefficient())});
    case 1:
      return draw.call("add_.Tensor", {ref(view), ref(draw.partner(view, "f"))});
    case 2:
      return draw.call("tanh_", {ref(view)});
    default:
      return draw.call("copy_", {ref(view), ref(draw.partner(view, "f"))});
  }
}

std::vector<Row> writes() {
  return {
      {"through a view", through_a_view},
      {"through a view", through_a_view},
      {"through a view", through_a_view},
      in_place("copy_", {.kinds = "fc"}, with_partner),
      in_place("add_.Tensor", {.kinds = "fc"}, with_partner),
      in_place("mul_.Tensor", {.kinds = "fc"}, with_partner),
      in_place("mul_.Scalar", {.kinds = "fc"}, with_number),
      in_place("fill_.Scalar", {.kinds = "f"}, with_number),
      in_place("fill_.Scalar", {.kinds = "ib"}, [](Draw&, int) { return std::vector<Arg>{num(int64_t{1})}; }),
      in_place("zero_", {.kinds = "fcib"}, alone),
      in_place("logical_not_", {.kinds = "b"}, alone),
      in_place("masked_fill_.Scalar", {.kinds = "f"},
               [](Draw& draw, int self) {
                 return std::vector<Arg>{ref(draw.partner(self, "b")), num(0.5)};
               }),
      in_place("clamp_min_", {}, with_number),
      in_place("cumsum_", {.min_dim = 1},
               [](Draw& draw, int self) { return std::vector<Arg>{num(draw.dim_of(self))}; }),
      in_place("squeeze_", {}, alone),
      in_place("unsqueeze_", {},
               [](Draw& draw, int self) { return std::vector<Arg>{num(draw.between(0, draw.tensor(self).dim()))}; }),
      in_place("t_", {.min_dim = 2, .max_dim = 2}, alone),
      in_place("transpose_", {.min_dim = 2},
               [](Draw& draw, int self) {
                 return std::vector<Arg>{num(draw.dim_of(self)), num(draw.dim_of(self))};
               }),
  };
}

}  // namespace

std::vector<Family> write_families() { return {{"write", 12, writes()}}; }

}  // namespace tessera::testing
