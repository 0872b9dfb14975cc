#include "tests/conformance/programs/soundness.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace tessera::testing {

namespace {

constexpr double kUnstable = 2e-10;  // bound for the effect of a noise of 1e-13
constexpr double kLargestGradient = 1e6;

bool alike(const at::Tensor& a, const at::Tensor& b, double tolerance) {
  return a.defined() == b.defined() && (!a.defined() || difference(a, b, tolerance).empty());
}

bool all_stable(const Tensors& clean, const Tensors& noisy) { return std::ranges::equal(clean, noisy, is_stable); }

bool all_exact(const Tensors& clean, const Tensors& wide) { return std::ranges::equal(clean, wide, is_exact); }

bool all_moderate(const Tensors& tensors) {
  return std::ranges::all_of(tensors, [](const at::Tensor& t) {
    const auto [low, high] = t.defined() ? bounds(t) : std::pair<double, double>{0, 0};
    return low > -kLargestGradient && high < kLargestGradient;
  });
}

}  // namespace

bool is_stable(const at::Tensor& clean, const at::Tensor& noisy) { return alike(clean, noisy, kUnstable); }

bool are_stable(const std::vector<c10::IValue>& clean, const std::vector<c10::IValue>& noisy) {
  return std::ranges::equal(clean, noisy, [](const c10::IValue& a, const c10::IValue& b) {
    return a.isDouble() ? std::abs(a.toDouble() - b.toDouble()) < kUnstable : a == b;
  });
}

namespace {

// Whether a type with 3 bits less would hold the values, because shares need some bits.
bool has_spare_bits(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const at::Tensor values =
      (tensor.is_complex() ? at::view_as_real(tensor.resolve_conj()) : tensor).to(at::kDouble).contiguous();
  const int bits = tensor.scalar_type() == at::kBFloat16 ? 5 : tensor.scalar_type() == at::kHalf ? 8 : 20;
  const auto* data = values.const_data_ptr<double>();
  return std::all_of(data, data + values.numel(), [bits](double x) {
    int exponent = 0;
    const double scaled = std::ldexp(std::frexp(x, &exponent), bits);
    return scaled == std::rint(scaled);
  });
}

// Returns the elements in piece `part` of `parts` pieces of a dim, and zeros elsewhere.
at::Tensor piece_of(const at::Tensor& flow, int64_t dim, int64_t part, int64_t parts) {
  if (flow.dim() == 0) return part == 0 ? flow.clone() : at::zeros_like(flow);
  std::vector<int64_t> sizes(static_cast<size_t>(flow.dim()), 1);
  sizes[static_cast<size_t>(c10::maybe_wrap_dim(dim, flow.dim()))] = flow.size(dim);
  const at::Tensor piece = at::arange(flow.size(dim)).mul(parts).floor_divide(std::max<int64_t>(flow.size(dim), 1));
  return at::where(piece.eq(part).view(sizes), flow, at::zeros_like(flow));
}

// Whether the gradients for shares of the incoming gradients add up to the gradients for the whole, as the ranks add
// them. The first gradients are checked, and the second ones, which are linear in the incoming gradients, too.
bool are_exact_in_shares(const Program& program, const Plain& plain) {
  const auto of = [&](const Tensors& flows) {
    PlainMachine machine(Twin::kClean);
    const Results values = run_forward(program, machine);
    Tensors all = gradients(program, values, flows, /*create_graph=*/program.twice);
    if (program.twice) {
      const Tensors second = second_gradients(program, values, all, plain.gradients.second_flows);
      all.insert(all.end(), second.begin(), second.end());
    }
    return all;
  };
  Tensors wholes = plain.gradients.first;
  wholes.insert(wholes.end(), plain.gradients.second.begin(), plain.gradients.second.end());
  const auto wide = [](const at::Tensor& tensor) {
    return tensor.detach().to(tensor.is_complex() ? at::kComplexDouble : at::kDouble);
  };
  const auto add_up = [&](int64_t shares, const std::function<at::Tensor(const at::Tensor&, int64_t)>& share_of) {
    Tensors sums(wholes.size());
    for (int64_t share = 0; share < shares; ++share) {
      Tensors flows;
      {
        const at::NoGradGuard no_grad;
        for (const auto& flow : plain.flows) flows.push_back(share_of(flow, share));
      }
      const at::AutoGradMode grad(true);
      const Tensors found = of(flows);
      for (size_t i = 0; i < found.size(); ++i) {
        if (!wholes[i].defined() || !is_narrow(wholes[i].scalar_type()) || !found[i].defined()) continue;
        sums[i] = sums[i].defined() ? sums[i] + wide(found[i]) : wide(found[i]);
      }
    }
    return std::equal(sums.begin(), sums.end(), wholes.begin(), [&](const at::Tensor& sum, const at::Tensor& whole) {
      return !sum.defined() || alike(sum, wide(whole), 0);
    });
  };
  const int64_t ranks = c10::multiply_integers(program.mesh);
  return add_up(2,
                [](const at::Tensor& flow, int64_t share) {
                  const at::Tensor half = at::full_like(flow, 0.5);
                  return share == 0 ? half : flow - half;
                }) &&
         add_up(2,
                [](const at::Tensor& flow, int64_t share) {
                  const at::Tensor odd = flow * (index_like(flow) % 2);
                  return share == 0 ? odd : flow - odd;
                }) &&
         add_up(ranks, [&](const at::Tensor& flow, int64_t share) { return piece_of(flow, 0, share, ranks); }) &&
         add_up(ranks, [&](const at::Tensor& flow, int64_t share) { return piece_of(flow, -1, share, ranks); });
}

}  // namespace

bool is_exact(const at::Tensor& clean, const at::Tensor& wide) {
  if (!clean.defined() || !is_narrow(clean.scalar_type())) return alike(clean, wide, 1e-13);
  const auto type = clean.is_complex() ? at::kComplexDouble : at::kDouble;
  return alike(clean.detach().to(type), wide, 0) && has_spare_bits(clean.detach());
}

std::pair<double, double> bounds(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {0, 0};
  const at::NoGradGuard no_grad;
  const at::Tensor values = (tensor.is_complex() ? at::view_as_real(tensor.detach().resolve_conj()) : tensor.detach())
                                .to(at::kDouble)
                                .contiguous();
  const auto* data = values.const_data_ptr<double>();
  if (!std::all_of(data, data + values.numel(), [](double x) { return std::isfinite(x); })) {
    return {-INFINITY, INFINITY};
  }
  const auto [low, high] = std::minmax_element(data, data + values.numel());
  return {*low, *high};
}

bool is_sound(const Program& program, const Plain& plain) {
  const auto& [first, flows, second] = plain.gradients;
  if (!all_moderate(plain.values.tensors) || !all_moderate(first) || !all_moderate(second)) return false;
  for (const Twin twin : kDisturbed) {
    const Plain noisy = run_plain(program, twin);
    if (!are_stable(plain.values.others, noisy.values.others) ||
        !all_stable(plain.values.tensors, noisy.values.tensors) || !all_stable(first, noisy.gradients.first) ||
        !all_stable(second, noisy.gradients.second)) {
      return false;
    }
  }
  if (!has_narrow(program)) return true;
  const Plain wide = run_plain(program, Twin::kWide);
  return all_exact(plain.values.tensors, wide.values.tensors) && all_exact(first, wide.gradients.first) &&
         all_exact(second, wide.gradients.second) && (program.flows.empty() || are_exact_in_shares(program, plain));
}

}  // namespace tessera::testing
