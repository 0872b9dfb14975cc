#include "tessera/nn/linear/lora.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>

#include "tessera/base/error.h"
#include "tessera/base/philox.h"
#include "tessera/dtensor/random/random_fill.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/kernels/linear/linear.h"
#include "tessera/nn/linear/quantized_linear.h"

namespace tessera::nn {
namespace {

// For context parallelism. `own` are ranges of token indices in this rank's shard of a sequence, and `chunks` are this
// rank's chunks of the sequence. Returns the positions of the tokens in `own` in the unsharded sequence.
tessera::IndexSpans in_whole_row(const tessera::IndexSpans& own, const std::vector<kernels::ContextChunk>& chunks) {
  tessera::IndexSpans whole;
  for (const auto& run : own) {
    for (const auto& chunk : chunks) {
      const int64_t begin = std::max(run.start, chunk.local);
      const int64_t end = std::min(run.start + run.size, chunk.local + chunk.tokens);
      if (begin < end) whole.push_back({chunk.begin + begin - chunk.local, end - begin});
    }
  }
  return whole;
}

// Returns the region of x [rows, tokens, ...] in a virtual tensor of all rows of the run (2^40 rows). A random number
// depends on its index in the virtual tensor, so a dropout mask does not depend on how rows and tokens are sharded.
tessera::ShardRegion region_in_run(const at::Tensor& x, const LoraDropout& dropout, const std::string& path) {
  constexpr int64_t kRows = int64_t{1} << 40;
  auto region =
      is_dtensor(x) ? tessera::ShardRegion(x.sizes(), *device_mesh(x), placements(x)) : tessera::ShardRegion(x.sizes());
  region.global[0] = kRows;
  for (auto& run : region.index_spans[0]) run.start += dropout.first_row;
  if (!dropout.context) return region;
  const auto& context = *dropout.context;
  TESSERA_CHECK(
      x.dim() >= 3 && x.size(1) == context.tokens_of(dropout.context_rank), ErrorKind::kShape,
      "[nn.lora] {}: dropout: found inputs {}, wanted [rows, {}, ...]: the tokens that rank {} of {} holds of "
      "rows of {} tokens",
      path, c10::str(x.sizes()), context.tokens_of(dropout.context_rank), dropout.context_rank, context.ranks(),
      context.tokens());
  region.global[1] = context.tokens();
  region.index_spans[1] = in_whole_row(region.index_spans[1], context.chunks_of(dropout.context_rank));
  return region;
}

// Returns the norm of each row of weight [out, in]: [out], in float32 or wider.
at::Tensor row_norms(const at::Tensor& weight) {
  const auto wide = weight.itemsize() < 4 ? weight.to(at::kFloat) : weight;
  return wide.square().sum(1).sqrt();
}

}  // namespace

void LoraDropout::begin_step(const std::vector<int64_t>& rows) {
  std::vector<int64_t> first;
  for (const int64_t each : rows) {
    begin_call(each);
    first.push_back(first_row);
  }
  first_row_of = std::move(first);
}

void LoraDropout::begin_call(int64_t rows) {
  if (!first_row_of.empty()) return;
  first_row = row_of_call ? row_of_call(calls) : next_row;
  next_row = first_row + rows;
  ++calls;
}

LoraMatrix::LoraMatrix(int64_t in, int64_t out, const ParameterOptions& options) {
  register_parameter("weight", weight, at::empty({out, in}, options.tensor_options()));
}

at::Tensor LoraMatrix::forward(const at::Tensor& x) { return tessera::kernels::linear(x, weight); }

LoraMagnitude::LoraMagnitude(int64_t out, const ParameterOptions& options) {
  register_parameter("weight", weight, at::empty({out}, options.tensor_options()), /*decay=*/false);
}

LoraLinear::LoraLinear(Linear& former, const LoraSettings& settings)
    : Linear(former, /*with_weight=*/true),
      settings_(settings),
      scaling_(settings.alpha /
               (settings.rslora ? std::sqrt(static_cast<double>(settings.rank)) : static_cast<double>(settings.rank))),
      stream_(philox_stream(settings.path)) {
  TESSERA_CHECK(settings.rank >= 1, ErrorKind::kConfig, "[nn.lora] {}: rank: found {}, wanted at least 1",
                settings.path, settings.rank);
  TESSERA_CHECK(
      !former.has_hooks() && !is_dtensor(former.weight), ErrorKind::kConfig,
      "[nn.lora] {}: found a Linear that is parallel or has hooks, wanted one without. Add adapters before the "
      "model is parallelized.",
      settings.path);
  if (auto* const quantized = dynamic_cast<QuantizedLinear*>(&former)) packed = quantized->packed;
  former.set_requires_grad(false);
  const int64_t out = packed ? packed->out : weight.size(0), in = packed ? packed->in : weight.size(1);
  const bool has_values = packed && packed->weight.defined();
  const auto packed_on = has_values ? packed->weight.device() : c10::Device(c10::kMeta);
  const ParameterOptions options{.dtype = settings.dtype, .device = packed ? packed_on : weight.device()};
  register_module("lora_A", lora_A, std::make_shared<LoraMatrix>(in, settings.rank, options));
  register_module("lora_B", lora_B, std::make_shared<LoraMatrix>(settings.rank, out, options));
  if (settings.dora) {
    register_module("lora_magnitude_vector", lora_magnitude_vector, std::make_shared<LoraMagnitude>(out, options));
  }
  train(former.training());
}

at::Tensor LoraLinear::base_weight() const { return packed ? packed->values() : weight.detach(); }

at::Tensor LoraLinear::product(const at::Tensor& x, const at::Tensor& bias_of) const {
  return packed ? packed->product(x, bias_of) : tessera::kernels::linear(x, weight, bias_of);
}

at::Tensor LoraLinear::apply_dropout(const at::Tensor& x) const {
  const auto& dropout = settings_.dropout;
  if (!dropout || dropout->probability == 0 || !training()) return x;
  at::Tensor mask;
  {
    const c10::NoGradGuard no_grad;
    const at::Tensor part = local_tensor_of(x);
    const double p = dropout->probability;
    const auto drawn = at::empty(part.sizes(), part.options().dtype(at::kFloat));
    tessera::fill_random(drawn, region_in_run(x, *dropout, settings_.path),
                         {.seed = dropout->seed ^ stream_, .operation = 0},
                         {.kind = tessera::DistributionKind::kUniform, .a = 0, .b = 1});
    // Inputs that are not dropped are scaled by 1 / (1 - p), as in torch.nn.Dropout.
    mask = drawn.ge(p).to(part.scalar_type()).mul_(1 / (1 - p));
    if (is_dtensor(x)) {
      mask = from_local(mask, device_mesh(x), placements(x), {.shape = x.sizes().vec(), .stride = x.strides().vec()});
    }
  }
  return x * mask;
}

// Returns DoRA's factor of each output: magnitude / norm of the row of the adapted weight. The gradient treats the norm
// as a constant (section 4.3 of the paper).
at::Tensor LoraLinear::row_scale() const {
  at::Tensor norms;
  {
    const c10::NoGradGuard no_grad;
    const auto delta = lora_B->weight.detach().matmul(lora_A->weight.detach()).mul(scaling_);
    const auto base = base_weight();
    norms = row_norms(base + delta.to(base.scalar_type()));
  }
  return lora_magnitude_vector->weight / norms.to(lora_magnitude_vector->weight.scalar_type());
}

at::Tensor LoraLinear::forward(const at::Tensor& x) {
  const at::Tensor y = product(x, bias);
  const at::Tensor in = apply_dropout(x);
  const auto dtype = lora_A->weight.scalar_type();
  // The scaling is applied to the output of lora_A, because it is smaller than the output of lora_B.
  const at::Tensor narrow = (*lora_A)(in.scalar_type() == dtype ? in : in.to(dtype)).mul(scaling_);
  const at::Tensor low = (*lora_B)(narrow);
  if (!lora_magnitude_vector) return y + low.to(y.scalar_type());
  // `low` is the output of the adapter, and y = W x + bias. DoRA without dropout returns scale * (W x + low) + bias,
  // which is y + (scale - 1) * W x + scale * low. As in PEFT, y is computed from x without dropout, and the other terms
  // from x with dropout.
  const at::Tensor scale = row_scale();
  const at::Tensor unbiased = in.is_same(x) && !bias.defined() ? y : product(in, {});
  return y + ((scale - 1) * unbiased + scale * low).to(y.scalar_type());
}

at::Tensor LoraLinear::merged(const at::Tensor& weight, const at::Tensor& a, const at::Tensor& b,
                              const at::Tensor& magnitude, double scaling) {
  const c10::NoGradGuard no_grad;
  at::Tensor sum = weight.to(at::kFloat) + b.to(at::kFloat).matmul(a.to(at::kFloat)).mul(scaling);
  if (magnitude.defined()) sum = sum * (magnitude.to(at::kFloat) / row_norms(sum)).unsqueeze(1);
  return sum.to(weight.scalar_type());
}

}  // namespace tessera::nn
