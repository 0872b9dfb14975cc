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
  for (int64_t i = n - 1; i > 0; --i) std::swap(order[i], order[number_below(state, i + 1)]);
  return order;
}

// Returns doubles that each of the types holds without rounding.
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
      shared = share_of(shared, placements[m], (*mesh->coordinate())[m], mesh->shape()[m]);
      cut[m] = Replicate();
    }
  }
  const at::Tensor spread = distribute_tensor(shared.clone(), mesh, cut, std::nullopt);
  if (cut == placements) return spread;
  return from_local(to_local(spread), mesh, placements,
                    {.shape = whole.sizes().vec(), .stride = whole.contiguous().strides().vec()});
}

}  // namespace tessera::testing
