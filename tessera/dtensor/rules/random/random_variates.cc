// Random operations with rejection sampling (Poisson, binomial, gamma, Dirichlet): for each element numbers are drawn
// until one is accepted. Each element has its own stream of random numbers, keyed by the element's index in the global
// tensor, and is computed by scalar code in double. So the values are bitwise the same for every placement. On devices
// other than the CPU the operands are copied to the CPU.
//
// G. Marsaglia and W. Tsang, "A simple method for generating gamma variables", 2000. W. Hörmann, "The transformed
// rejection method for generating Poisson random variables" and "The generation of binomial random variates", 1993.
#include <ATen/ATen.h>
#include <math.h>

#include <cmath>
#include <limits>
#include <numbers>

#include "tessera/base/philox.h"
#include "tessera/dtensor/rules/elementwise/pointwise.h"
#include "tessera/dtensor/rules/random/random_call.h"

namespace tessera {

namespace {

// log|Gamma(x)|. std::lgamma is not used because it writes the sign to a global variable, which is not thread-safe.
double log_gamma(double x) {
  int sign = 0;
  return ::lgamma_r(x, &sign);
}

// The stream of random numbers of one element. The Philox counter contains the number of the block (`round_`), which is
// at least 1. It therefore differs from all counters that random_fill.cc uses for the same operation number.
class ElementRandomStream {
 public:
  ElementRandomStream(const RandomStreamKey& key, int64_t index) : key_(key), index_(static_cast<uint64_t>(index)) {}

  // A uniform number in (0, 1].
  double uniform() {
    if (used_ == 2) {
      block_ = philox(key_.seed, index_, key_.operation ^ (++round_ << kRoundShift));
      used_ = 0;
    }
    const PhiloxBlock words{block_[2 * used_], block_[2 * used_ + 1], 0, 0};
    ++used_;
    return philox_uniform(words);
  }
  double normal() {
    const double radius = std::sqrt(-2 * std::log(uniform()));
    return radius * std::cos(2 * std::numbers::pi * uniform());
  }

 private:
  static constexpr int kRoundShift = 40;  // the number of the operation is below 2^40; the round uses the bits above
  const RandomStreamKey& key_;
  uint64_t index_;
  uint64_t round_ = 0;
  PhiloxBlock block_{};
  int used_ = 2;
};

double draw_gamma(ElementRandomStream& stream, double shape) {
  if (!(shape > 0)) return shape == 0 ? 0 : std::numeric_limits<double>::quiet_NaN();
  const double boost = shape < 1 ? std::pow(stream.uniform(), 1 / shape) : 1;
  const double d = (shape < 1 ? shape + 1 : shape) - 1.0 / 3;
  const double c = 1 / std::sqrt(9 * d);
  for (;;) {
    const double x = stream.normal();
    const double root = 1 + c * x;
    if (root <= 0) continue;
    const double v = root * root * root;
    if (std::log(stream.uniform()) < 0.5 * x * x + d * (1 - v + std::log(v))) return boost * d * v;
  }
}

double draw_poisson(ElementRandomStream& stream, double rate) {
  if (rate < 10) {  // Knuth: counts factors until the product is small
    const double least = std::exp(-rate);
    double product = stream.uniform();
    double count = 0;
    for (; product > least; ++count) product *= stream.uniform();
    return count;
  }
  const double root = std::sqrt(rate);
  const double b = 0.931 + 2.53 * root;
  const double a = -0.059 + 0.02483 * b;
  const double inverse_alpha = 1.1239 + 1.1328 / (b - 3.4);
  const double accept = 0.9277 - 3.6224 / (b - 2);
  for (;;) {
    const double u = stream.uniform() - 0.5;
    const double v = stream.uniform();
    const double side = 0.5 - std::abs(u);
    const double k = std::floor((2 * a / side + b) * u + rate + 0.43);
    if (side >= 0.07 && v <= accept) return k;
    if (k < 0 || (side < 0.013 && v > side)) continue;
    if (std::log(v) + std::log(inverse_alpha) - std::log(a / (side * side) + b) <=
        -rate + k * std::log(rate) - log_gamma(k + 1)) {
      return k;
    }
  }
}

double draw_binomial(ElementRandomStream& stream, double count, double p) {
  if (std::isnan(count) || std::isnan(p)) return std::numeric_limits<double>::quiet_NaN();
  if (count <= 0 || p <= 0) return 0;
  if (p >= 1) return count;
  if (p > 0.5) return count - draw_binomial(stream, count, 1 - p);
  if (count * p < 10) {  // counts the trials up to each success
    const double log_failure = std::log1p(-p);
    double trials = 0;
    double successes = 0;
    for (;; ++successes) {
      trials += std::ceil(std::log(stream.uniform()) / log_failure);
      if (trials > count) return successes;
    }
  }
  const double deviation = std::sqrt(count * p * (1 - p));
  const double b = 1.15 + 2.53 * deviation;
  const double a = -0.0873 + 0.0248 * b + 0.01 * p;
  const double c = count * p + 0.5;
  const double alpha = (2.83 + 5.1 / b) * deviation;
  const double accept = 0.92 - 4.2 / b;
  const double mode = std::floor((count + 1) * p);
  const double log_odds = std::log(p / (1 - p));
  for (;;) {
    const double u = stream.uniform() - 0.5;
    const double v = stream.uniform();
    const double side = 0.5 - std::abs(u);
    const double k = std::floor((2 * a / side + b) * u + c);
    if (side >= 0.07 && v <= accept) return k;
    if (k < 0 || k > count) continue;
    const double scaled = std::log(v * alpha / (a / (side * side) + b));
    if (scaled <= log_gamma(mode + 1) + log_gamma(count - mode + 1) - log_gamma(k + 1) - log_gamma(count - k + 1) +
                      (k - mode) * log_odds) {
      return k;
    }
  }
}

// Expands a parameter of the distribution, such as a rate, to one value for each element that this rank draws: a
// contiguous float64 CPU tensor of sizes draw.region().sizes.
at::Tensor expand_parameter(const RandomCall& draw, const at::Tensor& parameter) {
  return parameter.to(at::TensorOptions(at::kCPU).dtype(at::kDouble)).expand(draw.region().sizes).contiguous();
}

// Writes each(stream, i) to element i of `values`, a float64 tensor of sizes draw.region().sizes. `stream` is the
// element's random stream.
template <class Each>
void fill_each(RandomCall& draw, const at::Tensor& values, Each each) {
  const RandomStreamKey key = draw.key();
  auto* out = values.mutable_data_ptr<double>();
  for_each_contiguous_range(draw.region(), [&](int64_t local, int64_t global, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      ElementRandomStream stream(key, global + i);
      out[local + i] = each(stream, local + i);
    }
  });
}

at::Tensor empty_values(const RandomCall& draw) { return at::empty(draw.region().sizes, at::kDouble); }

// Returns make()'s values as the result of the operation, with the dtype and device of the result tensor. If `like` is
// a meta tensor, make() is not called. So RandomCall::key() is not called either, and the call does not count as a
// random operation.
template <class Make>
void finish_as(RandomCall& draw, const at::Tensor& like, Make make) {
  const at::Tensor to = draw.result_tensor(like);
  draw.finish(like.is_meta() ? to : to.copy_(make()));
}

void poisson(RandomCall& draw) {
  const at::Tensor self = draw.tensor("self");
  finish_as(draw, self, [&] {
    const at::Tensor rates = expand_parameter(draw, self);
    TESSERA_CHECK(at::all(rates >= 0).item<bool>(), ErrorKind::kShape,
                  "[dtensor.dispatch] {}: found a negative rate, wanted rates of 0 or more.", draw.call().op.name);
    const at::Tensor values = empty_values(draw);
    const auto* rate = rates.const_data_ptr<double>();
    fill_each(draw, values, [=](ElementRandomStream& stream, int64_t i) { return draw_poisson(stream, rate[i]); });
    return values;
  });
}

void binomial(RandomCall& draw) {
  const at::Tensor count = draw.tensor("count");
  finish_as(draw, count.expand(draw.region().sizes), [&] {
    const at::Tensor counts = expand_parameter(draw, count);
    const at::Tensor odds = expand_parameter(draw, draw.tensor("prob"));
    const at::Tensor values = empty_values(draw);
    fill_each(draw, values,
              [n = counts.const_data_ptr<double>(), p = odds.const_data_ptr<double>()](
                  ElementRandomStream& stream, int64_t i) { return draw_binomial(stream, std::floor(n[i]), p[i]); });
    return values;
  });
}

// Draws gamma variates with the shapes `self`. As in ATen, values below the smallest normal number of the dtype are
// raised to that number.
at::Tensor gammas(RandomCall& draw, const at::Tensor& self) {
  const at::Tensor shapes = expand_parameter(draw, self);
  const at::Tensor values = empty_values(draw);
  const double least = self.scalar_type() == at::kDouble ? std::numeric_limits<double>::min()
                                                         : double{std::numeric_limits<float>::min()};
  fill_each(draw, values, [shape = shapes.const_data_ptr<double>(), least](ElementRandomStream& stream, int64_t i) {
    const double drawn = draw_gamma(stream, shape[i]);
    return drawn < least ? least : drawn;
  });
  return values;
}

void standard_gamma(RandomCall& draw) {
  const at::Tensor self = draw.tensor("self");
  finish_as(draw, self, [&] { return gammas(draw, self); });
}

// Draws gamma variates and divides them by their sum along the last dim, which must not be sharded.
void dirichlet(RandomCall& draw) {
  const at::Tensor self = draw.tensor("self");
  finish_as(draw, self, [&] {
    const at::Tensor values = gammas(draw, self);
    const int64_t width = values.size(-1);
    auto* row = values.mutable_data_ptr<double>();
    for (int64_t left = values.numel(); left > 0; left -= width, row += width) {
      double sum = 0;  // summed in the same order on every rank
      for (int64_t i = 0; i < width; ++i) sum += row[i];
      for (int64_t i = 0; i < width; ++i) row[i] /= sum;
    }
    return values;
  });
}

}  // namespace

void add_random_variate_rules(RuleTable& table) {
  table.add("aten::poisson", elementwise(poisson));
  table.add("aten::binomial", elementwise(binomial));
  table.add("aten::_standard_gamma", elementwise(standard_gamma));
  table.add("aten::_sample_dirichlet", [](const OpCall& call, Proposal& proposal) {
    propose_elementwise(call, proposal, dirichlet);
    std::erase_if(proposal.strategies, [last = call.inputs[0].dim() - 1](const Strategy& strategy) {
      return strategy.inputs[0].is_any_shard() && strategy.inputs[0].dim == last;
    });
  });
  table.add("aten::_standard_gamma_grad", pointwise(PartialRule::kNone));
}

}  // namespace tessera
