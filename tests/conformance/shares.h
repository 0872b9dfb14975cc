// The shares that the ranks hold of a Partial tensor.
//
//   for (const auto& partial : partials_of(type, nonnegative, {4})) ... share_of(whole, partial, rank, 4) ...
//
// The shares differ from rank to rank. Their reduction is exactly the tensor, except for kAvg over 3 ranks and norms.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "tessera/dtensor/tensor/placement.h"

namespace tessera::testing {

// Whether the type has few bits: bf16, f16, f32, c64.
inline bool is_narrow(c10::ScalarType type) {
  return type == at::kBFloat16 || type == at::kHalf || type == at::kFloat || type == at::kComplexFloat;
}

inline at::Tensor index_like(const at::Tensor& whole) {
  return at::arange(whole.numel(), at::kLong).view(whole.sizes());
}

// Returns a share for a maximum or minimum. Rank r holds some of the elements exactly; in the others its values are
// less extreme.
inline at::Tensor extreme_share(const at::Tensor& whole, bool max, int64_t r, int64_t k) {
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

// The weights sum to one; some are negative.
inline double weight_of_share(int64_t r, int64_t k) {
  return r == 0 ? 1 + 0.25 * static_cast<double>(k / 2) - 0.5 * static_cast<double>((k - 1) / 2)
                : (r % 2 == 1 ? -0.25 : 0.5);
}

// Returns the share of rank r of k.
inline at::Tensor share_of(const at::Tensor& whole, const Placement& placement, int64_t r, int64_t k) {
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
      if (whole.scalar_type() == at::kBool) return extreme_share(whole, /*max=*/false, r, k);
      if (!whole.is_floating_point() && !whole.is_complex()) return r == 0 ? whole.clone() : at::ones_like(whole);
      return r == 0 ? whole * 2 : at::full_like(whole, r == 1 ? 0.5 : 1.0);
    default:
      break;
  }
  if (!whole.is_floating_point() && !whole.is_complex()) return r == 0 ? whole - 3 * (k - 1) : at::full_like(whole, 3);
  const double times = placement.reduce_op == ReduceOp::kAvg ? static_cast<double>(k) : 1.0;
  if (is_narrow(whole.scalar_type())) {  // few bits more than the whole has
    return r == 0 ? (whole - 0.5) * times : at::full_like(whole, r == 1 ? 0.5 * times : 0.0);
  }
  return whole * (weight_of_share(r, k) * times);
}

// Returns the Partials that a tensor of this type may have on a mesh of this shape.
inline std::vector<Placement> partials_of(c10::ScalarType type, bool nonnegative, const std::vector<int64_t>& mesh) {
  const bool complex = c10::isComplexType(type);
  const bool real = c10::isFloatingType(type);
  if (type == at::kBool) return {Partial(ReduceOp::kMax), Partial(ReduceOp::kMin), Partial(ReduceOp::kProduct)};
  std::vector<Placement> all{Partial()};
  if (!complex) {  // the collectives neither multiply nor order complex numbers
    all.push_back(Partial(ReduceOp::kProduct));
    all.push_back(Partial(ReduceOp::kMax));
    all.push_back(Partial(ReduceOp::kMin));
  }
  const bool powers_of_two = std::ranges::all_of(mesh, [](int64_t k) { return (k & (k - 1)) == 0; });
  if ((complex || real) && (!is_narrow(type) || powers_of_two)) all.push_back(Partial(ReduceOp::kAvg));
  if (type == at::kDouble && nonnegative) {
    all.push_back(NormPartial(1));
    all.push_back(NormPartial(2));
    all.push_back(NormPartial(3));
  }
  return all;
}

}  // namespace tessera::testing
