#include "tessera/kernels/attention/flash_attention.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <limits>

#include "tessera/base/error.h"
#include "tessera/dtensor/tensor/saved_value.h"
#include "tessera/kernels/attention/head_groups.h"
#include "tessera/kernels/autograd/activation_checkpoint_cache.h"
#include "tessera/kernels/dispatch/device_kernels.h"

namespace tessera::kernels {
namespace {

// The kernels load vectors of 8 elements, and support heads up to 256 elements.
constexpr int64_t kHeadVector = 8, kLargestHead = 256;

at::Tensor rows_without_gaps(const at::Tensor& tensor) { return tensor.stride(-1) == 1 ? tensor : tensor.contiguous(); }

// FlashOptions, converted to the arguments of ATen's kernels.
struct KernelCall {
  std::optional<at::Tensor> begins;
  std::optional<int64_t> longest;      // set with `begins`
  std::optional<int64_t> window;       // of causal attention; for memory-efficient attention
  std::optional<int64_t> left, right;  // the same window for flash attention, in place of `causal`
  std::optional<double> scale;
};

KernelCall call_of(const FlashOptions& options) {
  KernelCall call;
  if (options.begins.defined()) {
    call.begins = options.begins;
    call.longest = options.longest;
  }
  if (options.causal && options.window > 0) {
    call.window = options.window;
    call.left = options.window - 1;
    call.right = 0;
  }
  if (options.scale > 0) call.scale = options.scale;
  return call;
}

// ---- memory-efficient attention ----

// The backward kernel reads the log-sum-exps of a number of queries that is rounded up to a multiple of kSumsTogether.
constexpr int64_t kSumsTogether = 32;
enum EfficientMask : int64_t { kNoMask = 0, kCausalFromTopLeft = 1 };

bool in_16_bits(at::ScalarType dtype) { return dtype == at::kHalf || dtype == at::kBFloat16; }

int64_t mask_of(const FlashOptions& options) { return options.causal ? kCausalFromTopLeft : kNoMask; }

// The kernel takes packed documents as one row [1, N, H, d]. It does not support grouped-query attention, so keys and
// values are repeated for each query head.
at::Tensor as_rows(const at::Tensor& tensor) { return tensor.dim() == 3 ? tensor.unsqueeze(0) : tensor; }
at::Tensor as_input_rows(const at::Tensor& rows, const at::Tensor& like) {
  return like.dim() == 3 ? rows.squeeze(0) : rows;
}

FlashResult efficient_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                              const FlashOptions& options) {
  const auto call = call_of(options);
  const int64_t heads = q.size(-2);
  const auto results = at::_efficient_attention_forward(
      rows_without_gaps(as_rows(q)), rows_without_gaps(as_rows(repeat_heads(k, /*dim=*/-2, heads))),
      rows_without_gaps(as_rows(repeat_heads(v, /*dim=*/-2, heads))), /*bias=*/std::nullopt, call.begins, call.begins,
      call.longest, call.longest, /*dropout_p=*/0.0, mask_of(options), /*compute_log_sumexp=*/true, call.scale,
      /*seqlen_k=*/std::nullopt, call.window);
  const auto& log_sums = std::get<1>(results);
  return {as_input_rows(std::get<0>(results), q), call.begins ? log_sums : log_sums.narrow(2, 0, q.size(1))};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> efficient_backward(const at::Tensor& gradient, const at::Tensor& q,
                                                                  const at::Tensor& k, const at::Tensor& v,
                                                                  const FlashResult& result,
                                                                  const FlashOptions& options) {
  const auto call = call_of(options);
  const int64_t heads = q.size(-2), longest_q = call.longest.value_or(as_rows(q).size(1)),
                longest_k = call.longest.value_or(as_rows(k).size(1));
  // Padding queries get log sums of infinity, so that their weights exp(score - log sum) are 0.
  const int64_t missing = (kSumsTogether - result.log_sums.size(2) % kSumsTogether) % kSumsTogether;
  const auto log_sums =
      missing == 0 ? result.log_sums.contiguous()
                   : at::constant_pad_nd(result.log_sums, {0, missing}, std::numeric_limits<double>::infinity());
  const auto random = at::empty({}, q.options().dtype(at::kLong));  // the dropout seed and offset; there is no dropout
  const auto [grad_q, grad_k, grad_v, grad_bias] = at::_efficient_attention_backward(
      as_rows(gradient).contiguous(), rows_without_gaps(as_rows(q)),
      rows_without_gaps(as_rows(repeat_heads(k, /*dim=*/-2, heads))),
      rows_without_gaps(as_rows(repeat_heads(v, /*dim=*/-2, heads))),
      /*bias=*/std::nullopt, as_rows(result.out).contiguous(), call.begins, call.begins, longest_q, longest_k, log_sums,
      /*dropout_p=*/0.0, random, random, mask_of(options),
      /*bias_requires_grad=*/false, call.scale, /*num_splits_key=*/std::nullopt, call.window);
  return {as_input_rows(grad_q, q), sum_heads(as_input_rows(grad_k, k), /*dim=*/-2, k.size(-2)),
          sum_heads(as_input_rows(grad_v, v), /*dim=*/-2, v.size(-2))};
}

// ---- flash attention ----

// Autograd function of attention with a result that is already computed: forward returns it, backward computes the
// gradients.
struct FlashAttentionFunction : torch::autograd::Function<FlashAttentionFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const at::Tensor& out, const at::Tensor& log_sums,
                            const FlashOptions& options) {
    const auto result = out.detach();
    FlashOptions other_options = options;
    other_options.begins.reset();  // a saved variable, so that autograd detects a write to it
    ctx->save_for_backward({q, k, v, result, log_sums, options.begins});
    ctx->saved_data["options"] = make_saved_value(other_options);
    return result;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    TESSERA_CHECK(!c10::GradMode::is_enabled(), ErrorKind::kInternal,
                  "[kernels.flash] attention has no second derivative here. Differentiate without create_graph.");
    const auto saved = ctx->get_saved_variables();
    FlashOptions options = saved_value<FlashOptions>(ctx->saved_data["options"]);
    options.begins = saved[5];
    const auto [q, k, v] = flash_backward(grads[0], saved[0], saved[1], saved[2], {saved[3], saved[4]}, options);
    return {q, k, v, {}, {}, {}};
  }
};

}  // namespace

bool has_flash_attention(c10::Device device, at::ScalarType dtype) {
  if (dtype == at::kFloat) {
    // The trial call includes a window and the backward, which some devices' kernels do not support.
    static DeviceKernels efficient{"aten::_efficient_attention_forward", "aten::_efficient_attention_backward"};
    return efficient.work_on(device, dtype, [&] {
      const auto two = at::zeros({1, 2, 1, kHeadVector}, at::TensorOptions(dtype).device(device));
      const FlashOptions windowed{.window = 1};
      flash_backward(two, two, two, two, flash_forward(two, two, two, windowed), windowed);
    });
  }
  if (!in_16_bits(dtype)) return false;
  static DeviceKernels fused{"aten::_flash_attention_forward", "aten::_flash_attention_backward"};
  return fused.work_on(device, dtype, [&] {
    const auto one = at::zeros({1, 1, 1, kHeadVector}, at::TensorOptions(dtype).device(device));
    flash_forward(one, one, one, {});
  });
}

bool supports_flash_head_dim(int64_t head_dim) { return head_dim % kHeadVector == 0 && head_dim <= kLargestHead; }

bool supports_flash_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  return supports_flash_head_dim(q.size(-1)) && q.numel() > 0 && k.numel() > 0 && k.scalar_type() == q.scalar_type() &&
         v.scalar_type() == q.scalar_type() && has_flash_attention(q.device(), q.scalar_type());
}

FlashResult flash_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const FlashOptions& options) {
  const at::AutoDispatchBelowADInplaceOrView below;
  if (!in_16_bits(q.scalar_type())) return efficient_forward(q, k, v, options);
  const auto call = call_of(options);
  const auto results = at::_flash_attention_forward(
      rows_without_gaps(q), rows_without_gaps(k), rows_without_gaps(v), call.begins, call.begins,
      call.longest.value_or(q.size(1)), call.longest.value_or(k.size(1)), /*dropout_p=*/0.0,
      options.causal && !call.window, /*return_debug_mask=*/false, call.scale, call.left, call.right);
  return {std::get<0>(results), std::get<1>(results)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_backward(const at::Tensor& gradient, const at::Tensor& q,
                                                              const at::Tensor& k, const at::Tensor& v,
                                                              const FlashResult& result, const FlashOptions& options) {
  const at::AutoDispatchBelowADInplaceOrView below;
  if (!in_16_bits(q.scalar_type())) return efficient_backward(gradient, q, k, v, result, options);
  const auto call = call_of(options);
  const auto begins = call.begins.value_or(at::Tensor());
  // _flash_attention_backward requires the random state of the dropout as arguments. There is no dropout, so the values
  // of these two tensors do not matter.
  const auto random = at::empty({2}, q.options().dtype(at::kUInt64)), unused = at::empty({0}, q.options());
  return at::_flash_attention_backward(
      rows_without_gaps(gradient), rows_without_gaps(q), rows_without_gaps(k), rows_without_gaps(v),
      rows_without_gaps(result.out), result.log_sums.contiguous(), begins, begins, call.longest.value_or(q.size(1)),
      call.longest.value_or(k.size(1)),
      /*dropout_p=*/0.0, options.causal && !call.window, random, unused, call.scale, call.left, call.right);
}

at::Tensor flash_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const FlashOptions& options) {
  const auto known = ActivationCheckpointCache::cached_or_computed([&] {
    const auto result = flash_forward(q, k, v, options);
    return std::vector<at::Tensor>{result.out, result.log_sums};
  });
  return FlashAttentionFunction::apply(q, k, v, known.at(0), known.at(1), options);
}

}  // namespace tessera::kernels
