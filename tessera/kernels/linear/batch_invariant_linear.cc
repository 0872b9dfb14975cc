#include "tessera/kernels/linear/batch_invariant_linear.h"

#include <ATen/Parallel.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <span>

#include "tessera/base/error.h"
#include "tessera/formats/gguf/gguf_quants.h"
#include "tessera/kernels/dispatch/result_form.h"
#include "tessera/kernels/simd/gemv_kernels.h"

namespace tessera::kernels {
namespace {

constexpr int64_t kThreadWork = 1 << 16;  // least work of a thread, in multiply-adds

// Multiplies m rows of x with rows [first, first + count) of the weight, with the loop of the weight's format.
void multiply(const float* x, int64_t m, const InferenceWeight& weight, int64_t first, int64_t count, float* y) {
  const auto& kernels = gemv_kernels();
  const int64_t k = weight.in(), n = weight.out();
  const float* scales = weight.scales().defined() ? weight.scales().const_data_ptr<float>() + first : nullptr;
  const void* data = weight.values().const_data_ptr();
  switch (weight.dtype()) {
    case WeightFormat::kFloat32:
      return kernels.float32(x, m, k, static_cast<const float*>(data) + first * k, scales, count, k, y + first, n);
    case WeightFormat::kBFloat16:
      return kernels.bfloat16(x, m, k, static_cast<const uint16_t*>(data) + first * k, scales, count, k, y + first, n);
    case WeightFormat::kFloat16:
      return kernels.float16(x, m, k, static_cast<const Float16*>(data) + first * k, scales, count, k, y + first, n);
    case WeightFormat::kInt8:
      return kernels.int8(x, m, k, static_cast<const int8_t*>(data) + first * k, scales, count, k, y + first, n);
    case WeightFormat::kInt4:
      return kernels.q4(x, m, k, static_cast<const Q4Block*>(data) + first * (k / Q4Block::kElements), scales, count, k,
                        y + first, n);
  }
}

c10::ScalarType element_type(WeightFormat dtype) {
  return dtype == WeightFormat::kFloat32 ? at::kFloat : dtype == WeightFormat::kFloat16 ? at::kHalf : at::kBFloat16;
}

// Encodes whole blocks as GGUF's Q4_1, which formats/gguf/gguf_quants.h decodes. The scale is a block's range divided
// by 15, rounded to fp16; a weight that was decoded from Q4_1 therefore gets the same values again. Returns false where
// a block has a value that is not finite or whose scale or minimum exceeds fp16 (65504).
bool to_q4_blocks(std::span<const float> values, std::span<Q4Block> blocks) {
  constexpr size_t kElements = Q4Block::kElements, kHalf = kElements / 2;
  for (size_t at = 0; at < blocks.size(); ++at) {
    const auto own = values.subspan(at * kElements, kElements);
    auto& block = blocks[at];
    float minimum = own[0], maximum = own[0];
    for (const float value : own) {
      if (!std::isfinite(value)) return false;
      minimum = std::min(minimum, value);
      maximum = std::max(maximum, value);
    }
    block.d = c10::detail::fp16_ieee_from_fp32_value((maximum - minimum) / 15.0F);
    block.m = c10::detail::fp16_ieee_from_fp32_value(minimum);
    const float d = c10::detail::fp16_ieee_to_fp32_value(block.d), m = c10::detail::fp16_ieee_to_fp32_value(block.m);
    if (!std::isfinite(d) || !std::isfinite(m)) return false;
    const auto code = [&](float value) {
      return d == 0 ? uint8_t{0} : static_cast<uint8_t>(std::clamp(std::nearbyint((value - m) / d), 0.0F, 15.0F));
    };
    for (size_t i = 0; i < kHalf; ++i) block.codes[i] = static_cast<uint8_t>(code(own[i]) | code(own[kHalf + i]) << 4);
  }
  return true;
}

at::Tensor pack_q4_blocks(const at::Tensor& weight) {
  const int64_t out = weight.size(0), in = weight.size(1), blocks = in / Q4Block::kElements;
  auto packed = at::empty({out, blocks * static_cast<int64_t>(sizeof(Q4Block))}, at::kByte);
  auto* const to = reinterpret_cast<Q4Block*>(packed.mutable_data_ptr<uint8_t>());
  constexpr int64_t kBlock = 4096;  // rows that are converted to fp32 at once
  for (int64_t first = 0; first < out; first += kBlock) {
    const int64_t count = std::min(kBlock, out - first);
    const auto rows = weight.narrow(0, first, count).to(at::kFloat).contiguous();
    const float* from = rows.const_data_ptr<float>();
    std::atomic<bool> fits = true;
    at::parallel_for(0, count, std::max<int64_t>(1, kThreadWork / std::max<int64_t>(1, in)),
                     [&](int64_t begin, int64_t end) {
                       const auto rows_of = [&](auto* data, int64_t width) {
                         return std::span(data + begin * width, static_cast<size_t>((end - begin) * width));
                       };
                       if (!to_q4_blocks(rows_of(from, in), rows_of(to + first * blocks, blocks))) fits = false;
                     });
    TESSERA_CHECK(fits, ErrorKind::kFormat,
                  "[kernels.batch_invariant_linear] found a weight [{}, {}] with values that are not finite or exceed "
                  "65504, wanted values "
                  "that int4 blocks can hold. Check the checkpoint, or use bfloat16.",
                  out, in);
  }
  return packed;
}

}  // namespace

InferenceWeight InferenceWeight::of(const at::Tensor& weight, WeightFormat dtype) {
  TESSERA_CHECK(weight.dim() == 2 && weight.is_cpu() && weight.is_floating_point(), ErrorKind::kShape,
                "[kernels.batch_invariant_linear] found a weight of {} dims on {}, wanted [out, in] on the CPU",
                weight.dim(), weight.device().str());
  const at::NoGradGuard no_grad;
  if (dtype == WeightFormat::kInt4 && weight.size(1) % Q4Block::kElements != 0) dtype = WeightFormat::kInt8;
  InferenceWeight made;
  made.dtype_ = dtype;
  made.in_ = weight.size(1);
  if (dtype == WeightFormat::kInt4) {
    made.values_ = pack_q4_blocks(weight.detach());
    return made;
  }
  if (dtype != WeightFormat::kInt8) {
    made.values_ = weight.detach().to(element_type(dtype)).contiguous();
    return made;
  }
  // int8: codes from -127 to 127 with one scale per row, the row's largest absolute value divided by 127. A row of
  // zeros has scale 0.
  made.values_ = at::empty(weight.sizes(), at::kChar);
  made.scales_ = at::empty({weight.size(0)}, at::kFloat);
  constexpr int64_t kBlock = 4096;  // rows that are converted to fp32 at once
  for (int64_t first = 0; first < weight.size(0); first += kBlock) {
    const int64_t count = std::min(kBlock, weight.size(0) - first);
    const auto rows = weight.narrow(0, first, count).to(at::kFloat);
    const auto scales = rows.abs().amax(1).div_(127);
    made.scales_.narrow(0, first, count).copy_(scales);
    const auto steps = at::where(scales.gt(0), scales, at::ones_like(scales)).unsqueeze(1);
    made.values_.narrow(0, first, count).copy_(rows.div(steps).round_().clamp_(-127, 127));
  }
  return made;
}

at::Tensor InferenceWeight::dequantized() const {
  if (dtype_ != WeightFormat::kInt4) {
    const auto values = values_.to(at::kFloat);
    return scales_.defined() ? values.mul(scales_.unsqueeze(1)) : values;
  }
  auto values = at::empty({out(), in_}, at::kFloat);
  dequantize(GgmlType::kQ4_1, std::as_bytes(std::span(values_.const_data_ptr<uint8_t>(), values_.nbytes())),
             {values.mutable_data_ptr<float>(), static_cast<size_t>(values.numel())});
  return values;
}

// The output columns of all weights form one range, which is divided over the threads, so that small weights do not
// leave threads idle. A result depends only on its row of x and its row of the weight, so this division does not change
// it.
std::vector<at::Tensor> batch_invariant_linears(const at::Tensor& rows_in,
                                                std::span<const InferenceWeight* const> weights,
                                                std::span<const at::Tensor> biases) {
  TESSERA_CHECK(rows_in.is_cpu() && rows_in.scalar_type() == at::kFloat && rows_in.dim() >= 1, ErrorKind::kShape,
                "[kernels.batch_invariant_linear] found {} on {}, wanted fp32 rows on the CPU",
                toString(rows_in.scalar_type()), rows_in.device().str());
  const auto x = rows_in.contiguous();
  std::vector<at::Tensor> results;
  int64_t columns = 0;
  for (const auto* weight : weights) {
    TESSERA_CHECK(
        x.size(-1) == weight->in(), ErrorKind::kShape,
        "[kernels.batch_invariant_linear] found rows of {} elements for a weight [{}, {}], wanted rows as long as the "
        "weight's",
        x.size(-1), weight->out(), weight->in());
    results.push_back(at::empty(with_last(x.sizes(), weight->out()), x.options()));
    columns += weight->out();
  }
  const int64_t k = x.size(-1), m = c10::multiply_integers(x.sizes().slice(0, static_cast<size_t>(x.dim() - 1)));
  const float* rows = x.const_data_ptr<float>();
  const int64_t grain = std::max<int64_t>(16, kThreadWork / std::max<int64_t>(1, m * k));
  at::parallel_for(0, columns, grain, [&](int64_t begin, int64_t end) {
    // At the start of iteration i, `begin` and `end` count output columns from the first column of weight i. The
    // iteration subtracts the number of columns of weight i from both (`begin` stays at least 0), so that they then
    // count from the first column of weight i + 1.
    for (size_t i = 0; i < weights.size() && begin < end; ++i) {
      const int64_t n = weights[i]->out();
      if (begin < n) multiply(rows, m, *weights[i], begin, std::min(end, n) - begin, results[i].data_ptr<float>());
      begin = std::max<int64_t>(0, begin - n);
      end -= n;
    }
  });
  for (size_t i = 0; i < biases.size(); ++i) {
    if (biases[i].defined()) results[i].add_(biases[i]);
  }
  return results;
}

at::Tensor batch_invariant_linear(const at::Tensor& x, const InferenceWeight& weight, const at::Tensor& bias) {
  const InferenceWeight* one = &weight;
  return batch_invariant_linears(x, std::span(&one, 1), std::span(&bias, 1))[0];
}

at::Tensor batch_invariant_gate(const at::Tensor& gate, const at::Tensor& up, bool gelu) {
  TESSERA_CHECK(
      gate.sizes() == up.sizes() && gate.scalar_type() == at::kFloat && up.scalar_type() == at::kFloat &&
          gate.is_contiguous() && up.is_contiguous() && gate.is_cpu() && up.is_cpu() && gate.dim() >= 1,
      ErrorKind::kShape,
      "[kernels.batch_invariant_gate] gate and up: wanted two contiguous fp32 tensors of the same shape on the "
      "CPU");
  const auto out = at::empty_like(gate);
  const int64_t width = gate.size(-1), rows = width == 0 ? 0 : gate.numel() / width;
  const float *a = gate.const_data_ptr<float>(), *b = up.const_data_ptr<float>();
  float* to = out.data_ptr<float>();
  at::parallel_for(0, rows, std::max<int64_t>(1, (1 << 13) / std::max<int64_t>(1, width)),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t row = begin; row < end; ++row) {
                       gemv_kernels().gate(a + row * width, b + row * width, width, gelu, to + row * width);
                     }
                   });
  return out;
}

std::string_view vector_level_name() { return gemv_kernels().name; }

}  // namespace tessera::kernels
