#include "tests/conformance/programs/inputs.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera::testing {

uint64_t next_number(uint64_t& state) {
  uint64_t z = (state += 0x9e3779b97f4a7c15ULL);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

namespace {

int64_t number_below(uint64_t& state, int64_t n) {
  return static_cast<int64_t>(next_number(state) % static_cast<uint64_t>(std::max<int64_t>(n, 1)));
}

std::vector<int64_t> permutation(int64_t n, uint64_t& state) {
  std::vector<int64_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  for (int64_t i = n - 1; i > 0; --i) {
    std::swap(order[i], order[number_below(state, i + 1)]);
  }
  return order;
}

// Doubles that any of the types holds without rounding.
std::vector<double> numbers(const Fill& fill, int64_t count, bool narrow, uint64_t& state) {
  std::vector<double> values(count);
  const double grain = narrow ? 0.25 : 1.0 / 64;
  const auto order = permutation(count, state);
  for (int64_t i = 0; i < count; ++i) {
    switch (fill.kind) {
      case Fill::Kind::kUniform: {
        const auto low = static_cast<int64_t>(std::ceil(fill.low / grain));
        const auto high = static_cast<int64_t>(std::floor(fill.high / grain));
        values[i] = static_cast<double>(low + number_below(state, high - low + 1)) * grain;
        break;
      }
      case Fill::Kind::kDistinct:
        values[i] = static_cast<double>(order[i] - count / 2) * 0.25;
        break;
      case Fill::Kind::kBelow:
        values[i] = static_cast<double>(number_below(state, fill.below));
        break;
      case Fill::Kind::kPermutation:
        values[i] = static_cast<double>(order[i]);
        break;
      case Fill::Kind::kFlags:
        values[i] = static_cast<double>(number_below(state, 2));
        break;
    }
  }
  return values;
}

at::Tensor index_like(const at::Tensor& whole) { return at::arange(whole.numel(), at::kLong).view(whole.sizes()); }

// A share of an extreme: rank r holds some of the elements, the others have less.
at::Tensor extreme_share(const at::Tensor& whole, bool max, int64_t r, int64_t k) {
  const at::Tensor mine = (index_like(whole) % k) == r;
  at::Tensor other;
  if (whole.scalar_type() == at::kBool) {
    other = at::full_like(whole, !max);
  } else if (!whole.is_floating_point()) {
    other = max ? at::where(whole > 0, whole - 1, whole) : whole + 1;
  } else {
    other = max ? whole - 0.5 * static_cast<double>(1 + r) : whole + 0.5 * static_cast<double>(1 + r);
  }
  return at::where(mine, whole, other.to(whole.scalar_type()));
}

// Weights that sum to one, some of them negative.
double weight(int64_t r, int64_t k) {
  return r == 0 ? 1 + 0.25 * static_cast<double>(k / 2) - 0.5 * static_cast<double>((k - 1) / 2)
                : (r % 2 == 1 ? -0.25 : 0.5);
}

// The share of rank r of k.
at::Tensor share(const at::Tensor& whole, const Placement& placement, int64_t r, int64_t k) {
  if (placement.kind == Placement::Kind::kNormPartial) {
    const double part =
        r == 0 ? 1 - static_cast<double>(k - 1) / static_cast<double>(2 * k) : 1 / static_cast<double>(2 * k);
    return whole * std::pow(part, 1 / static_cast<double>(placement.norm_order()));
  }
  switch (placement.reduce_op) {
    case ReduceOp::kMax:
    case ReduceOp::kMin:
      return extreme_share(whole, placement.reduce_op == ReduceOp::kMax, r, k);
    case ReduceOp::kProduct:
      if (whole.scalar_type() == at::kBool) {
        return extreme_share(whole, /*max=*/false, r, k);
      }
      if (!whole.is_floating_point() && !whole.is_complex()) {
        return r == 0 ? whole.clone() : at::ones_like(whole);
      }
      return r == 0 ? whole * 2 : at::full_like(whole, r == 1 ? 0.5 : 1.0);
    default:
      break;
  }
  if (!whole.is_floating_point() && !whole.is_complex()) {
    return r == 0 ? whole - 3 * (k - 1) : at::full_like(whole, 3);
  }
  const double times = placement.reduce_op == ReduceOp::kAvg ? static_cast<double>(k) : 1.0;
  if (is_narrow(whole.scalar_type())) {  // few bits more than the whole has
    return r == 0 ? (whole - 0.5 * static_cast<double>(k - 1)) * times : at::full_like(whole, 0.5 * times);
  }
  return whole * (weight(r, k) * times);
}

}  // namespace

at::Tensor make_plain(const Step& step, uint64_t seed) {
  uint64_t state = seed * 0x100000001b3ULL + static_cast<uint64_t>(step.results[0]) * 7919 + 1;
  const int64_t count = c10::multiply_integers(step.sizes);
  const bool narrow = is_narrow(step.type);
  const auto values = numbers(step.fill, count, narrow, state);
  at::Tensor made = at::empty({count}, at::kDouble);
  std::copy(values.begin(), values.end(), made.mutable_data_ptr<double>());
  if (c10::isComplexType(step.type)) {
    const auto more = numbers(step.fill, count, narrow, state);
    at::Tensor imaginary = at::empty({count}, at::kDouble);
    std::copy(more.begin(), more.end(), imaginary.mutable_data_ptr<double>());
    made = at::complex(made, imaginary);
  }
  return made.to(step.type).view(step.sizes);
}

at::Tensor lay_out(const at::Tensor& whole, const MeshPtr& mesh, const Placements& placements) {
  const at::NoGradGuard no_grad;
  at::Tensor shared = whole.detach();
  Placements cut = placements;
  for (int64_t m = 0; m < mesh->ndim(); ++m) {
    if (placements[m].is_partial()) {
      shared = share(shared, placements[m], (*mesh->coordinate())[m], mesh->shape()[m]);
      cut[m] = Replicate();
    }
  }
  const at::Tensor spread = distribute_tensor(shared.clone(), mesh, cut, std::nullopt);
  if (cut == placements) {
    return spread;
  }
  return from_local(to_local(spread), mesh, placements,
                    {.shape = whole.sizes().vec(), .stride = whole.contiguous().strides().vec()});
}

std::vector<Placement> partials_of(c10::ScalarType type, bool nonnegative, const std::vector<int64_t>& mesh) {
  const bool complex = c10::isComplexType(type);
  const bool real = c10::isFloatingType(type);
  if (type == at::kBool) {
    return {Partial(ReduceOp::kMax), Partial(ReduceOp::kMin), Partial(ReduceOp::kProduct)};
  }
  std::vector<Placement> all{Partial()};
  if (!complex) {  // the collectives neither multiply nor order complex numbers
    all.push_back(Partial(ReduceOp::kProduct));
    all.push_back(Partial(ReduceOp::kMax));
    all.push_back(Partial(ReduceOp::kMin));
  }
  const bool powers_of_two = std::all_of(mesh.begin(), mesh.end(), [](int64_t k) { return (k & (k - 1)) == 0; });
  if ((complex || real) && (!is_narrow(type) || powers_of_two)) {
    all.push_back(Partial(ReduceOp::kAvg));
  }
  if (type == at::kDouble && nonnegative) {
    all.push_back(NormPartial(1));
    all.push_back(NormPartial(2));
    all.push_back(NormPartial(3));
  }
  return all;
}

}  // namespace tessera::testing
