#include "tessera/kernels/flash_attention.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/base/error.h"
#include "tessera/kernels/detail/device_kernels.h"
#include "tessera/kernels/kept_results.h"

namespace tessera::kernels {
namespace {

// The kernels read whole vectors of a head, up to this size.
constexpr int64_t kHeadVector = 8, kLargestHead = 256;

at::Tensor rows_without_gaps(const at::Tensor& tensor) { return tensor.stride(-1) == 1 ? tensor : tensor.contiguous(); }

struct FlashCall {
  std::optional<at::Tensor> begins;
  int64_t queries, keys;
  bool causal;
  std::optional<double> scale;
  std::optional<int64_t> left, right;  // a window is told in place of `causal`
};

FlashCall call_of(const at::Tensor& q, const at::Tensor& k, const FlashOptions& options) {
  const bool packed = options.begins.defined(), windowed = options.causal && options.window > 0;
  FlashCall call{.begins = packed ? std::optional(options.begins) : std::nullopt,
                 .queries = packed ? options.longest : q.size(1),
                 .keys = packed ? options.longest : k.size(1),
                 .causal = options.causal && !windowed,
                 .scale = options.scale > 0 ? std::optional(options.scale) : std::nullopt,
                 .left = std::nullopt,
                 .right = std::nullopt};
  if (windowed) call.left = options.window - 1, call.right = 0;
  return call;
}

// Whose result is known, so that what it adds is the derivative.
struct KnownFlash : torch::autograd::Function<KnownFlash> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const at::Tensor& out, const at::Tensor& log_sums,
                            const std::optional<at::Tensor>& begins, int64_t longest, bool causal, int64_t window,
                            double scale) {
    const auto result = out.detach();
    ctx->save_for_backward({q, k, v, result, log_sums, begins.value_or(at::Tensor())});
    ctx->saved_data["longest"] = longest;
    ctx->saved_data["causal"] = causal;
    ctx->saved_data["window"] = window;
    ctx->saved_data["scale"] = scale;
    return result;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    TESSERA_CHECK(!c10::GradMode::is_enabled(), ErrorKind::kInternal,
                  "[kernels.flash] attention has no second derivative here. Differentiate without create_graph.");
    const auto saved = ctx->get_saved_variables();
    const auto [q, k, v] = flash_backward(grads[0], saved[0], saved[1], saved[2], {saved[3], saved[4]},
                                          {.begins = saved[5],
                                           .longest = ctx->saved_data["longest"].toInt(),
                                           .causal = ctx->saved_data["causal"].toBool(),
                                           .window = ctx->saved_data["window"].toInt(),
                                           .scale = ctx->saved_data["scale"].toDouble()});
    return {q, k, v, {}, {}, {}, {}, {}, {}, {}};
  }
};

}  // namespace

bool has_flash_attention(c10::Device device, at::ScalarType dtype) {
  if (dtype != at::kHalf && dtype != at::kBFloat16) return false;
  static detail::DeviceKernels fused{"aten::_flash_attention_forward", "aten::_flash_attention_backward"};
  return fused.run_on(device, dtype, [&] {
    const auto one = at::zeros({1, 1, 1, kHeadVector}, at::TensorOptions(dtype).device(device));
    flash_forward(one, one, one, {});
  });
}

bool takes_flash_heads(int64_t head_dim) { return head_dim % kHeadVector == 0 && head_dim <= kLargestHead; }

bool runs_flash_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  return takes_flash_heads(q.size(-1)) && q.numel() > 0 && k.numel() > 0 && k.scalar_type() == q.scalar_type() &&
         v.scalar_type() == q.scalar_type() && has_flash_attention(q.device(), q.scalar_type());
}

FlashResult flash_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const FlashOptions& options) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto call = call_of(q, k, options);
  const auto results = at::_flash_attention_forward(
      rows_without_gaps(q), rows_without_gaps(k), rows_without_gaps(v), call.begins, call.begins, call.queries,
      call.keys, /*dropout_p=*/0.0, call.causal, /*return_debug_mask=*/false, call.scale, call.left, call.right);
  return {std::get<0>(results), std::get<1>(results)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_backward(const at::Tensor& gradient, const at::Tensor& q,
                                                              const at::Tensor& k, const at::Tensor& v,
                                                              const FlashResult& result, const FlashOptions& options) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto call = call_of(q, k, options);
  const auto begins = call.begins.value_or(at::Tensor());
  // Of dropout, which there is none of.
  const auto random = at::empty({2}, q.options().dtype(at::kUInt64)), unused = at::empty({0}, q.options());
  return at::_flash_attention_backward(
      rows_without_gaps(gradient), rows_without_gaps(q), rows_without_gaps(k), rows_without_gaps(v),
      rows_without_gaps(result.out), result.log_sums.contiguous(), begins, begins, call.queries, call.keys,
      /*dropout_p=*/0.0, call.causal, random, unused, call.scale, call.left, call.right);
}

at::Tensor flash_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const FlashOptions& options) {
  auto* const kept = KeptResults::current();
  FlashResult result;
  if (kept != nullptr && kept->mode() == KeptResults::Mode::kReplay) {
    const auto known = kept->next();
    result = {known.at(0), known.at(1)};
  } else {
    result = flash_forward(q, k, v, options);
    if (kept != nullptr) kept->keep({result.out, result.log_sums});
  }
  const auto begins = options.begins.defined() ? std::optional(options.begins) : std::nullopt;
  return KnownFlash::apply(q, k, v, result.out, result.log_sums, begins, options.longest, options.causal,
                           options.window, options.scale);
}

}  // namespace tessera::kernels
