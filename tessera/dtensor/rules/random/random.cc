// Sharding rules of random operations. The value of an element depends on its index in the global tensor
// (random/random_fill.h), so every dim may be sharded. ATen's kernel never runs; a LocalFunction draws the numbers
// instead.
#include <ATen/ATen.h>

#include <limits>

#include "tessera/base/error.h"
#include "tessera/dtensor/rules/random/random_call.h"

namespace tessera {

namespace {

void check_parameter(const RandomCall& draw, const char* name, double p, bool legal) {
  TESSERA_CHECK(legal, ErrorKind::kShape, "[dtensor.dispatch] {}: found {} = {}, out of range.", draw.call().op.name,
                name, p);
}

// Fills the result of an operation that has an argument self, such as uniform_ or randint_like, with values of
// `distribution`. For an in-place operation the result is self, otherwise a tensor with the shape of self.
void fill_target(RandomCall& draw, const Distribution& distribution) {
  const at::Tensor to = draw.result_tensor(draw.tensor("self"));
  draw.fill(to, distribution);
  draw.finish(to);
}

void uniform(RandomCall& draw) {
  const double from = draw.number("from", 0);
  const double to = draw.number("to", 1);
  check_parameter(draw, "to", to, from <= to);
  fill_target(draw, {DistributionKind::kUniform, from, to});
}

void cauchy(RandomCall& draw) {
  fill_target(draw, {DistributionKind::kCauchy, draw.number("median", 0), draw.number("sigma", 1)});
}

void log_normal(RandomCall& draw) {
  fill_target(draw, {DistributionKind::kLogNormal, draw.number("mean", 1), draw.number("std", 2)});
}

void exponential(RandomCall& draw) {
  const double rate = draw.number("lambd", 1);
  check_parameter(draw, "lambd", rate, rate > 0);
  fill_target(draw, {DistributionKind::kExponential, rate, 0});
}

void geometric(RandomCall& draw) {
  const double p = draw.number("p");
  check_parameter(draw, "p", p, p > 0 && p < 1);
  fill_target(draw, {DistributionKind::kGeometric, p, 0});
}

// normal_(self, mean, std) with numbers, and normal(mean, std) in which one or both arguments are tensors.
void normal(RandomCall& draw) {
  if (!draw.is_tensor("mean") && !draw.is_tensor("std")) {
    const double deviation = draw.number("std", 1);
    check_parameter(draw, "std", deviation, deviation >= 0);
    return fill_target(draw, {DistributionKind::kNormal, draw.number("mean", 0), deviation});
  }
  const at::Tensor like = draw.tensor(draw.is_tensor("mean") ? "mean" : "std");
  at::Tensor z = at::empty(draw.region().sizes, like.options());
  draw.fill(z, {DistributionKind::kNormal, 0, 1});
  // The product with std and the sum with mean are separate operations. A fused multiply-add could be used for some
  // elements only and would round them differently, depending on the sharding.
  z = draw.is_tensor("std") ? z * draw.tensor("std") : z * draw.number("std", 1);
  z = draw.is_tensor("mean") ? z + draw.tensor("mean") : z + draw.number("mean", 0);
  const at::Tensor to = draw.has("out") ? draw.tensor("out").copy_(z) : z;
  draw.finish(to);
}

Distribution integers(const RandomCall& draw, int64_t low, int64_t high) {
  TESSERA_CHECK(low < high, ErrorKind::kShape,
                "[dtensor.dispatch] {}: found integers from {} to {}, wanted a range with low < high.",
                draw.call().op.name, low, high);
  return {.kind = DistributionKind::kInteger,
          .low = low,
          .range = static_cast<uint64_t>(high) - static_cast<uint64_t>(low)};
}

int64_t integer(const RandomCall& draw, const char* name) {
  const c10::IValue& value = draw.value(name);
  return value.isTensor() ? value.toTensor().item<int64_t>() : value.toScalar().toLong();
}

void randint_like(RandomCall& draw) {
  fill_target(draw, integers(draw, draw.has("low") ? integer(draw, "low") : 0, integer(draw, "high")));
}

// The uniform distribution over the integers from 0 up to the largest for which the type represents all integers
// exactly.
Distribution all_integers(c10::ScalarType type) {
  uint64_t range = 2;
  if (at::isFloatingType(type)) {
    range = (uint64_t{1} << fraction_bits(type)) + 1;
  } else if (type != at::kBool) {
    const int bits = static_cast<int>(c10::elementSize(type)) * 8;
    range = uint64_t{1} << (at::isSignedType(type) ? bits - 1 : std::min(bits, 63));
  }
  return {.kind = DistributionKind::kInteger, .low = 0, .range = range};
}

void random(RandomCall& draw) {
  const at::Tensor to = draw.result_tensor(draw.tensor("self"));
  if (draw.has("to")) {
    draw.fill(to, integers(draw, draw.has("from") ? integer(draw, "from") : 0, integer(draw, "to")));
  } else if (draw.has("from")) {  // integers from `from` to the largest of all_integers()
    Distribution integers_from = all_integers(to.scalar_type());
    integers_from.low = integer(draw, "from");
    integers_from.range -= static_cast<uint64_t>(integers_from.low);
    draw.fill(to, integers_from);
  } else {
    draw.fill(to, all_integers(to.scalar_type()));
  }
  draw.finish(to);
}

// bernoulli(self) takes the probabilities from self; the other forms take them from p.
void bernoulli(RandomCall& draw) {
  const at::Tensor self = draw.tensor("self");
  const bool from_self = !draw.has("p");
  if (!from_self && !draw.is_tensor("p")) {
    const double p = draw.number("p");
    check_parameter(draw, "p", p, p >= 0 && p <= 1);
  }
  const at::Tensor to = draw.result_tensor(self);
  const at::Tensor mask = draw.bernoulli_mask(self, from_self ? c10::IValue(self) : draw.value("p"));
  if (!to.is_meta()) to.copy_(mask);
  draw.finish(to);
}

void native_dropout(RandomCall& draw) {
  const at::Tensor input = draw.tensor("input");
  const double p = draw.number("p");
  check_parameter(draw, "p", p, p >= 0 && p <= 1);
  const bool train = !draw.has("train") || draw.value("train").toBool();
  at::Tensor mask;
  at::Tensor output;
  if (!train) {
    mask = at::ones_like(input, input.options().dtype(at::kBool));
    output = input.clone();
  } else if (p == 1) {
    mask = at::zeros_like(input, input.options().dtype(at::kBool));
    output = at::zeros_like(input);
  } else {
    mask = draw.bernoulli_mask(input, 1 - p);
    output = input.mul(mask).mul_(1 / (1 - p));
  }
  if (draw.has("out0")) {
    output = draw.tensor("out0").copy_(output);
    mask = draw.tensor("out1").copy_(mask);
  }
  draw.call().finish({output, mask});
}

// rrelu_with_noise(self, noise, lower, upper, training): leaky ReLU with a random slope for each negative element in
// training. The slopes are then written to `noise`.
void rrelu_with_noise(RandomCall& draw) {
  const at::Tensor self = draw.tensor("self");
  const double lower = draw.number("lower", 0.125);
  const double upper = draw.number("upper", 1.0 / 3);
  at::Tensor noise = draw.tensor("noise");
  at::Tensor slopes;
  const bool training = draw.has("training") && draw.value("training").toBool();
  if (training) {
    const at::Tensor drawn = at::empty(draw.region().sizes, self.options());
    draw.fill(drawn, {DistributionKind::kUniform, lower, upper});
    slopes = at::where(self.le(0), drawn, at::ones({}, self.options()));
  } else {
    slopes = at::where(self.le(0), at::full({}, (lower + upper) / 2, self.options()), at::ones({}, self.options()));
  }
  const at::Tensor values = self * slopes;
  if (draw.call().op.name == "aten::rrelu_with_noise_functional") {
    draw.call().finish({values, training ? slopes : noise});
    return;
  }
  if (training) noise.copy_(slopes);
  const bool writes = draw.has("out") || draw.call().op.return_alias[0] >= 0;
  draw.finish(writes ? draw.result_tensor(self).copy_(values) : values);
}

// Without replacement, and for a single sample, each category i draws an exponential time with rate odds[i]; the sample
// is the num_samples categories with the smallest times. With replacement each of several samples draws a uniform
// number and finds its category by a binary search in the cumulative sums of the odds.
void multinomial(RandomCall& draw) {
  const at::Tensor odds = draw.tensor("self");
  const int64_t count = draw.value("num_samples").toInt();
  const bool replacement = draw.has("replacement") && draw.value("replacement").toBool();
  at::Tensor picked;
  if (odds.is_meta()) {
    Sizes sizes(odds.sizes().begin(), odds.sizes().end());
    sizes.back() = count;
    picked = at::empty(sizes, odds.options().dtype(at::kLong));
  } else if (replacement && count > 1) {
    const at::Tensor wide = odds.to(at::kDouble);
    const at::Tensor sums = wide.cumsum(-1);
    ShardRegion region = draw.region();
    region.global.back() = region.sizes.back() = count;
    region.index_spans.back() = {{0, count}};
    const at::Tensor u = at::empty(region.sizes, wide.options());
    RandomCall(draw.call(), region).fill(u, {DistributionKind::kUniform, 0, 1});
    picked = at::searchsorted(sums, u * sums.narrow(-1, odds.size(-1) - 1, 1), /*out_int32=*/false, /*right=*/true)
                 .clamp_max(odds.size(-1) - 1);
  } else {
    const at::Tensor clocks = at::empty(odds.sizes(), odds.options());
    draw.fill(clocks, {DistributionKind::kExponential, 1, 0});
    // `clocks` are exponential times with rate 1, so speed[i] = odds[i] / clocks[i] is 1 / time with rate odds[i], and
    // topk finds the smallest times. A category with odds 0 has speed 0, so it is sampled last.
    const at::Tensor speed = odds / clocks.clamp_min(std::numeric_limits<float>::min());
    picked = std::get<1>(speed.topk(count, -1));
  }
  draw.finish(draw.has("out") ? draw.tensor("out").copy_(picked) : picked);
}

// Rule of rand_like and similar operations, which read the shape of the operand but not its values. So a Partial
// operand need not be reduced.
Rule like(RandomKernel kernel) {
  return [kernel](const OpCall& call, Proposal& proposal) {
    propose_elementwise(call, proposal, kernel);
    for (const Placement& p : partials_among(call)) {
      proposal.strategies.push_back(replicate_rest(call, {{Replicate()}, {p}}));
    }
  };
}

// Whether the call takes its random numbers from the stream that the seed and the count of random operations select.
// Each such call increments the count, after manual_seed() also on ranks outside the mesh, so that the count stays
// equal on all ranks. False for a call with a `generator` argument, which takes its numbers from the generator instead,
// and for a call that draws no numbers, such as dropout outside training.
bool takes_random_stream(const OpCall& call) {
  if (call.has(call.arg_named("generator"))) return false;
  if (const int training = call.arg_named("training"); training >= 0) {  // rrelu_with_noise
    return call.has(training) && call.bool_at(training);
  }
  const int train = call.arg_named("train");  // native_dropout
  return train < 0 || ((!call.has(train) || call.bool_at(train)) && call.args[call.arg_named("p")].toDouble() != 1);
}

// Returns the LocalFunction that runs `kernel` for this rank's region of a tensor of global sizes `whole`. Empty on a
// rank outside the mesh.
LocalFunction random_local_function(RandomKernel kernel, c10::IntArrayRef whole, const DeviceMesh& mesh,
                                    const Placements& placements) {
  if (!mesh.coordinate()) return {};
  return [kernel, region = ShardRegion(whole, mesh, placements)](const LocalCall& local) {
    RandomCall draw(local, region);
    kernel(draw);
  };
}

// multinomial(self, num_samples, replacement): the rows of a 2-d self may be sharded; the categories (last dim) must
// not be.
void propose_multinomial(const OpCall& call, Proposal& proposal) {
  const auto& odds = call.inputs[0];
  std::vector<int64_t> drawn = odds.sizes.vec();
  drawn.back() = call.int_at(call.arg_named("num_samples"));
  const bool replacement = call.bool_at(call.arg_named("replacement"));
  TESSERA_CHECK(drawn.back() > 0 && (replacement || drawn.back() <= odds.sizes.back()), ErrorKind::kShape,
                "[dtensor.dispatch] {}: found {} samples of {} categories, wanted 1 or more, and without replacement "
                "at most the number of categories.",
                call.describe(), drawn.back(), odds.sizes.back());
  if (odds.dim() == 2) proposal.strategies.push_back({{Shard(0)}, {Shard(0)}});
  proposal.output(drawn);
  proposal.takes_random_stream = takes_random_stream(call);
  proposal.local = [](const OpCall& of, const PlacementChoice& choice) {
    return random_local_function(multinomial, of.inputs[0].sizes, *of.mesh, choice.inputs[0]);
  };
}

}  // namespace

void propose_elementwise(const OpCall& call, Proposal& proposal, RandomKernel kernel) {
  const Sizes whole = broadcast_sizes(call);
  const size_t outputs = std::max<size_t>(call.op.return_alias.size(), 1);
  const auto ndim = static_cast<int64_t>(whole.size());
  for (int64_t dim = 0; dim < ndim; ++dim) proposal.strategies.push_back(shard_broadcast_dim(call, whole, dim));
  for (size_t i = 0; i < outputs; ++i) proposal.output(whole);
  proposal.takes_random_stream = takes_random_stream(call);
  proposal.local = [kernel, whole](const OpCall& of, const PlacementChoice& choice) {
    return random_local_function(kernel, whole, *of.mesh, choice.outputs[0]);
  };
}

void add_random_rules(RuleTable& table) {
  add_random_variate_rules(table);
  const std::pair<const char*, RandomKernel> elementwise_ops[] = {
      {"aten::uniform", uniform},
      {"aten::normal", normal},
      {"aten::normal_functional", normal},
      {"aten::exponential", exponential},
      {"aten::cauchy", cauchy},
      {"aten::log_normal", log_normal},
      {"aten::geometric", geometric},
      {"aten::random", random},
      {"aten::bernoulli", bernoulli},
      {"aten::native_dropout", native_dropout},
      {"aten::rrelu_with_noise", rrelu_with_noise},
      {"aten::rrelu_with_noise_functional", rrelu_with_noise},
  };
  for (const auto& [name, kernel] : elementwise_ops) table.add(name, elementwise(kernel));
  table.add("aten::rand_like", like(uniform));
  table.add("aten::randn_like", like(normal));
  table.add("aten::randint_like", like(randint_like));
  table.add("aten::multinomial", propose_multinomial);
  table.add({"aten::native_dropout_backward"}, [](const OpCall& call, Proposal& proposal) {
    for (int64_t dim = 0; dim < call.inputs[0].dim(); ++dim) {
      proposal.strategies.push_back(same_placement(call, Shard(dim)));
    }
    proposal.output(call.inputs[0].sizes);
  });
}

}  // namespace tessera
