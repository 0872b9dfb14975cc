#include "tessera/models/config/rope.h"

#include <ATen/DeviceAccelerator.h>

#include <cmath>
#include <numbers>

#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/mesh/host_memory.h"

namespace tessera {
namespace {

// Returns 0, 2, 4, ... divided by d = head_dim.
at::Tensor exponents(int64_t head_dim) {
  return at::arange(0, head_dim, 2, at::kFloat).div_(static_cast<double>(head_dim));
}

// Returns theta ^ (0/d, 2/d, 4/d, ...), computed in fp32 as in transformers.
at::Tensor powers(double theta, int64_t head_dim) { return at::pow(theta, exponents(head_dim)); }

// Returns the base of the rope type "dynamic" for a sequence of `length` tokens. `length` is a number, or a float64
// scalar tensor on an accelerator; then the result is computed there and the host does not wait for it.
template <class Number>
Number dynamic_theta(const RopeConfig& rope, int64_t head_dim, double max_positions, const Number& length) {
  using std::pow;
  const auto dim = static_cast<double>(head_dim);
  const Number stretch = rope.factor * length / max_positions - (rope.factor - 1);
  // For head_dim 2 the only frequency is base ^ 0 = 1 for every base, and the exponent dim / (dim - 2) would not be
  // finite.
  return rope.theta * pow(stretch, head_dim > 2 ? dim / (dim - 2) : 0.0);
}

// YaRN, https://arxiv.org/abs/2309.00071: interpolates low frequencies, keeps high frequencies, and blends the
// frequencies between them with a linear ramp.
RopeFrequencies yarn(const RopeConfig& rope, int64_t head_dim) {
  const auto dim = static_cast<double>(head_dim);
  const auto correction = [&](double rotations) {
    const auto context = static_cast<double>(rope.original_max_position_embeddings);
    return dim * std::log(context / (rotations * 2 * std::numbers::pi)) / (2 * std::log(rope.theta));
  };
  double low = correction(rope.beta_fast), high = correction(rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1);
  if (low == high) high += 0.001;
  const auto ramp = at::arange(head_dim / 2, at::kFloat).sub_(low).div_(high - low).clamp_(0, 1);
  const auto kept = 1 - ramp;
  const auto frequencies = powers(rope.theta, head_dim);
  const auto inverse = 1.0 / (rope.factor * frequencies) * (1 - kept) + 1.0 / frequencies * kept;
  const auto magnitude = [&rope](double scale) {
    return rope.factor <= 1 ? 1.0 : 0.1 * scale * std::log(rope.factor) + 1.0;
  };
  const bool both = rope.mscale != 0 && rope.mscale_all_dim != 0;
  const double inferred = both ? magnitude(rope.mscale) / magnitude(rope.mscale_all_dim) : magnitude(1.0);
  return {inverse, rope.attention_factor.value_or(inferred)};
}

// Llama 3.1: divides low frequencies by the factor, keeps high frequencies, and blends those between.
at::Tensor llama3(const RopeConfig& rope, const at::Tensor& inverse) {
  const auto context = static_cast<double>(rope.original_max_position_embeddings);
  const double longest = context / rope.low_freq_factor, shortest = context / rope.high_freq_factor;
  const auto wavelength = 2 * std::numbers::pi / inverse;
  const auto scaled = at::where(wavelength > longest, inverse / rope.factor, inverse);
  const auto smooth = (context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
  const auto blended = (1 - smooth) * scaled / rope.factor + smooth * scaled;
  const auto between = wavelength.ge(shortest).logical_and(wavelength.le(longest));
  return at::where(between, blended, scaled);
}

}  // namespace

RopeFrequencies rope_frequencies(const RopeConfig& rope, int64_t head_dim, int64_t max_position_embeddings,
                                 int64_t sequence_length) {
  switch (rope.kind) {
    case RopeKind::kDefault:
      return {1.0 / powers(rope.theta, head_dim)};
    case RopeKind::kLinear:
      return {1.0 / powers(rope.theta, head_dim) / rope.factor};
    case RopeKind::kDynamic: {
      const auto max_positions = static_cast<double>(max_position_embeddings);
      const double length = std::max(static_cast<double>(sequence_length), max_positions);
      return {1.0 / powers(dynamic_theta(rope, head_dim, max_positions, length), head_dim)};
    }
    case RopeKind::kYarn:
      return yarn(rope, head_dim);
    case RopeKind::kLlama3:
      return {llama3(rope, 1.0 / powers(rope.theta, head_dim))};
  }
  return {};
}

namespace {

// Returns, on `device`, the frequencies of the rope type "dynamic" for the largest position in `positions`. If
// `positions` is on an accelerator, the frequencies are computed there, so the host does not wait for the accelerator.
RopeFrequencies dynamic_frequencies(const RopeConfig& rope, int64_t head_dim, int64_t max_position_embeddings,
                                    const at::Tensor& positions, c10::Device device) {
  if (positions.numel() > 0 && !is_dtensor(positions) && at::accelerator::isAccelerator(positions.device().type())) {
    const auto max_positions = static_cast<double>(max_position_embeddings);
    const at::Tensor length = (positions.max().to(at::kDouble) + 1).clamp_min(max_positions);
    const auto theta = dynamic_theta(rope, head_dim, max_positions, length).to(at::kFloat);
    return {1.0 / at::pow(theta, to_device_async(device, exponents(head_dim)))};
  }
  const int64_t length = positions.numel() > 0 ? positions.max().item<int64_t>() + 1 : 0;
  auto out = rope_frequencies(rope, head_dim, max_position_embeddings, length);
  out.inverse = to_device_async(device, out.inverse);
  return out;
}

}  // namespace

RotaryEmbedding::RotaryEmbedding(const RopeConfig& rope, int64_t head_dim, int64_t max_position_embeddings)
    : rope_(rope), head_dim_(head_dim), max_position_embeddings_(max_position_embeddings) {}

nn::RotaryAngles RotaryEmbedding::forward(const at::Tensor& x, const at::Tensor& positions) {
  at::NoGradGuard no_grad;
  const bool dynamic = rope_.kind == RopeKind::kDynamic;
  // Only the frequencies of the rope type "dynamic" depend on the positions. All other frequencies are computed once
  // per device.
  if (!dynamic && (!cached_.inverse.defined() || cached_.inverse.device() != x.device())) {
    cached_ = rope_frequencies(rope_, head_dim_, max_position_embeddings_, 0);
    cached_.inverse = to_device_async(x.device(), cached_.inverse);
  }
  const auto frequencies =
      dynamic ? dynamic_frequencies(rope_, head_dim_, max_position_embeddings_, positions, x.device()) : cached_;
  const auto angles = positions.to(at::kFloat).unsqueeze(-1) * replicate_like(frequencies.inverse, positions);
  nn::RotaryAngles table{angles.cos(), angles.sin()};
  if (frequencies.scaling != 1.0) {
    table.cos.mul_(frequencies.scaling);
    table.sin.mul_(frequencies.scaling);
  }
  return table;
}

nn::RotaryAngles RotaryEmbedding::forward_by_lengths(const at::Tensor& x, const at::Tensor& positions,
                                                     const at::Tensor& lengths) {
  at::NoGradGuard no_grad;
  const auto plain = [](const at::Tensor& values) {
    return local_tensor_of(values).to(at::kCPU, at::kLong).reshape({-1}).contiguous();
  };
  const auto flat = plain(positions), each_length = plain(lengths);
  const auto is_long = each_length.gt(max_position_embeddings_);
  if (!is_dynamic() || !is_long.any().item<bool>()) return (*this)(x, positions);
  const int64_t rows = flat.numel();
  nn::RotaryAngles table{at::empty({rows, head_dim_ / 2}, at::kFloat), at::empty({rows, head_dim_ / 2}, at::kFloat)};
  const auto short_rows = is_long.logical_not().nonzero().flatten();
  if (short_rows.numel() > 0) {
    const auto short_angles = forward(at::empty({0}), flat.index_select(0, short_rows).unsqueeze(0));
    table.cos.index_copy_(0, short_rows, short_angles.cos[0]);
    table.sin.index_copy_(0, short_rows, short_angles.sin[0]);
  }
  // Compute the angles one row at a time, so that a row gets the same angles as when it is computed alone: at::cos may
  // round the same number differently at different indices of a tensor.
  int64_t known_length = 0;
  at::Tensor inverse;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t length = each_length.const_data_ptr<int64_t>()[row];
    if (length <= max_position_embeddings_) continue;
    if (length != known_length) {
      inverse = rope_frequencies(rope_, head_dim_, max_position_embeddings_, known_length = length).inverse;
    }
    const auto angles = inverse * static_cast<float>(flat.const_data_ptr<int64_t>()[row]);
    table.cos[row].copy_(angles.cos());
    table.sin[row].copy_(angles.sin());
  }
  for (auto* angles : {&table.cos, &table.sin}) {
    const auto sent = to_device_async(x.device(), angles->view({positions.size(0), positions.size(1), -1}));
    *angles = replicate_like(sent, positions);
  }
  return table;
}

}  // namespace tessera
