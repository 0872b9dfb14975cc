#include "tessera/kernels/linear/linear.h"

#include <c10/core/GradMode.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <numeric>

#include "tessera/base/error.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/rules/table.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/kernels/autograd/activation_checkpoint_cache.h"
#include "tessera/kernels/autograd/recomputed_activation.h"
#include "tessera/kernels/autograd/weight_grad_store.h"
#include "tessera/kernels/dispatch/operations.h"
#include "tessera/kernels/dispatch/result_form.h"
#include "tessera/kernels/linear/linear_choice.h"
#include "tessera/kernels/rows/elementwise_kernels.h"
#include "tessera/kernels/simd/gemv_kernels.h"
#include "tessera/kernels/simd/vector_level.h"

namespace tessera::kernels {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

// A product with fewer rows than kMinRows takes as long as reading the weight, and the set-up of oneDNN costs more than
// oneDNN saves.
constexpr int64_t kMinRows = 16;

bool is_plain_cpu_float(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.scalar_type() == at::kFloat && !is_dtensor(tensor);
}

bool runs_on_onednn(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias) {
  return is_plain_cpu_float(x) && is_plain_cpu_float(weight) && x.dim() >= 1 && weight.dim() == 2 &&
         x.size(-1) == weight.size(1) && (!bias || is_plain_cpu_float(*bias)) &&
         x.numel() >= kMinRows * weight.size(1) && weight.size(0) >= kMinRows && weight.size(1) >= kMinRows &&
         onednn_is_faster();
}

// Returns whether a product of 16-bit tensors is computed in fp32 and rounded once.
bool product_in_fp32(const at::Tensor& a, const at::Tensor& b, int64_t rows) {
  return rows >= kMinRows && b.size(0) >= kMinRows && b.size(1) >= kMinRows && b.scalar_type() == a.scalar_type() &&
         !is_dtensor(a) && !is_dtensor(b) && runs_in_fp32(a) && runs_in_fp32(b);
}

// Flattens [..., n] to [rows, n], also if the tensor has no elements.
at::Tensor as_rows(const at::Tensor& tensor) {
  const auto leading = tensor.sizes().slice(0, static_cast<size_t>(tensor.dim()) - 1);
  return tensor.reshape({c10::multiply_integers(leading), tensor.size(-1)});
}

void check_shapes(c10::IntArrayRef x, c10::IntArrayRef weight, std::optional<c10::IntArrayRef> bias) {
  const bool fits = !x.empty() && weight.size() == 2 && x.back() == weight[1];
  TESSERA_CHECK(fits && (!bias || (bias->size() == 1 && bias->front() == weight[0])), ErrorKind::kShape,
                "[kernels.linear] x [{}], weight [{}], bias {}: wanted [..., in], [out, in] and [out]",
                fmt::join(x, ", "), fmt::join(weight, ", "),
                bias ? fmt::format("[{}]", fmt::join(*bias, ", ")) : "none");
}

at::Tensor linear_of(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias) {
  check_shapes(x.sizes(), weight.sizes(), bias ? std::optional(bias->sizes()) : std::nullopt);
  TESSERA_CHECK(x.scalar_type() == weight.scalar_type(), ErrorKind::kShape,
                "[kernels.linear] found x of {} and a weight of {}, wanted the same dtype",
                c10::toString(x.scalar_type()), c10::toString(weight.scalar_type()));
  // at::linear accepts a bias of another dtype only for some strides of x. at::matmul and add_ accept it always.
  if (bias && bias->scalar_type() != x.scalar_type()) return at::matmul(x, weight.t()).add_(*bias);
  if (product_in_fp32(x, weight, x.numel() / std::max<int64_t>(x.size(-1), 1))) {
    const auto wide = [](const at::Tensor& tensor) { return tensor.to(at::kFloat); };
    return linear_of(wide(x), wide(weight), bias ? OptionalTensor(wide(*bias)) : bias).to(x.scalar_type());
  }
  if (!runs_on_onednn(x, weight, bias)) return at::linear(x, weight, bias);
  return onednn_product(as_rows(x), weight, bias.value_or(at::Tensor())).view(with_last(x.sizes(), weight.size(0)));
}

at::Tensor weight_gradient_of(const at::Tensor& grad, const at::Tensor& x) {
  return product_nt(as_rows(grad).t(), as_rows(x).t());
}

constexpr Operation<&weight_gradient_of> weight_gradient{"tessera::linear_weight_gradient"};
constexpr Operation<&linear_of> call_linear{"tessera::linear"};

// y = x weight^T + bias as an autograd node. Like libtorch's node, it saves from x and weight only the tensors that the
// requested gradients need. It does not save an x that backward can recompute
// (kernels/autograd/recomputed_activation.h). Its backward is made of differentiable products. known: y, if it is
// already computed.
struct LinearFunction : torch::autograd::Function<LinearFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight,
                            const OptionalTensor& bias, const OptionalTensor& known) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->set_materialize_grads(false);
    const bool keeps_weight = x.requires_grad() || kernels::WeightGradStore::current_for_weights() != nullptr;
    const auto recomputed = weight.requires_grad() ? recomputed_activation(x, weight) : nullptr;
    const bool keeps_x = weight.requires_grad() && !recomputed;
    ctx->save_for_backward({keeps_x ? x : at::Tensor(), keeps_weight ? weight : at::Tensor()});
    if (recomputed) ctx->saved_data["x"] = at::IValue::make_capsule(recomputed);
    ctx->saved_data["has_bias"] = bias.has_value();
    return known ? known->detach() : call_linear(x, weight, bias);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    if (!grads[0].defined()) return torch::autograd::variable_list(4);
    const auto saved = ctx->get_saved_variables();
    const auto &weight = saved[1], &grad = grads[0];
    at::Tensor grad_x, grad_weight, grad_bias;
    if (ctx->needs_input_grad(0)) grad_x = call_linear(grad, weight.t().conj(), std::nullopt);
    if (ctx->needs_input_grad(1)) {
      const auto recomputed = ctx->saved_data.find("x");
      const at::Tensor x =
          recomputed == ctx->saved_data.end()
              ? saved[0]
              : c10::static_intrusive_pointer_cast<RecomputedActivation>(recomputed->second.toCapsule())->recompute();
      auto* const grad_store = kernels::WeightGradStore::current_for_weights();
      if (grad_store != nullptr && weight.defined() && !c10::GradMode::is_enabled()) {
        grad_store->add(weight, [grad, x] { return weight_gradient(grad, x.conj()); });
      } else {
        grad_weight = weight_gradient(grad, x.conj());
      }
    }
    if (ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(2)) {
      std::vector<int64_t> leading(static_cast<size_t>(grad.dim()) - 1);
      std::iota(leading.begin(), leading.end(), 0);
      grad_bias = leading.empty() ? grad : grad.sum(leading);
    }
    return {grad_x, grad_weight, grad_bias, at::Tensor()};
  }
};

struct WeightGradient : torch::autograd::Function<WeightGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& grad, const at::Tensor& x) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->set_materialize_grads(false);
    ctx->save_for_backward({grad, x});
    return weight_gradient(grad, x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    if (!grads[0].defined()) return torch::autograd::variable_list(2);
    const auto saved = ctx->get_saved_variables();
    return {call_linear(saved[1].conj(), grads[0], std::nullopt),
            call_linear(saved[0].conj(), grads[0].t(), std::nullopt)};
  }
};

// Plain tensors and DTensors use the same autograd node, LinearFunction. libtorch's own node is used for neither:
// depending on the strides of x, it saves x or a copy of x.
at::Tensor differentiable_linear(const at::Tensor& x, const at::Tensor& weight, const OptionalTensor& bias) {
  if (torch::autograd::compute_requires_grad(x, weight, bias)) {
    return LinearFunction::apply(x, weight, bias, std::nullopt);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return call_linear(x, weight, bias);
}

at::Tensor differentiable_weight_gradient(const at::Tensor& grad, const at::Tensor& x) {
  return WeightGradient::apply(grad, x);
}

// Sharding strategies of x [..., k], weight [n, k], bias [n]. The leading dims of x may be sharded. If n is sharded,
// weight and bias are sharded in dim 0. If k is sharded, the output is Partial; every rank then adds its bias, so the
// bias must be Partial, too.
void propose_linear(const OpCall& call, Proposal& proposal) {
  const auto &x = call.inputs[0], &weight = call.inputs[1];
  check_shapes(x.sizes, weight.sizes,
               call.inputs.size() > 2 ? std::optional<c10::IntArrayRef>(call.inputs[2].sizes) : std::nullopt);
  const int64_t last = x.dim() - 1;
  const auto add = [&](const Placement& output, const Placement& of_x, const Placement& of_weight,
                       const Placement& of_bias) {
    proposal.strategies.push_back(replicate_rest(call, {{output}, {of_x, of_weight, of_bias}}));
  };
  for (int64_t dim = 0; dim < last; ++dim) add(Shard(dim), Shard(dim), Replicate(), Replicate());
  add(Shard(last), Replicate(), Shard(0), Shard(0));
  add(Partial(), Shard(last), Shard(1), Partial());
  add_partial_strategies(call, proposal, {0, 2});
  add_partial_strategies(call, proposal, {1, 2});
  proposal.output(with_last(x.sizes, weight.sizes[0]));
}

// Proposes the sharding strategies of linear_weight_gradient: grad [..., n], x [..., k] -> [n, k]. If a mesh dim shards
// a leading dim of grad and x, the result is Partial on this mesh dim.
void propose_weight_gradient(const OpCall& call, Proposal& proposal) {
  const auto &grad = call.inputs[0], &x = call.inputs[1];
  const int64_t last = x.dim() - 1;
  for (int64_t dim = 0; dim < last; ++dim) proposal.strategies.push_back({{Partial()}, {Shard(dim), Shard(dim)}});
  proposal.strategies.push_back({{Shard(0)}, {Shard(last), Replicate()}});
  proposal.strategies.push_back({{Shard(1)}, {Replicate(), Shard(last)}});
  add_partial_strategies(call, proposal, {0});
  add_partial_strategies(call, proposal, {1});
  proposal.output({grad.sizes.back(), x.sizes.back()});
}

}  // namespace

void define_linear(torch::Library& library) {
  define_operation(library, "linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", TORCH_FN(linear_of),
                   TORCH_FN(differentiable_linear), propose_linear);
  define_operation(library, "linear_weight_gradient(Tensor grad, Tensor x) -> Tensor", TORCH_FN(weight_gradient_of),
                   TORCH_FN(differentiable_weight_gradient), propose_weight_gradient);
}

std::string_view linear_kernel_name() { return onednn_is_faster() ? "onednn" : "aten"; }

std::string_view linear_kernel_name(at::ScalarType type) { return fp32_is_faster_for(type) ? "fp32" : "native"; }

std::string describe_cpu_kernels() {
  return fmt::format("fp32 products {}, bf16 products {}, fp16 products {}, loops {}", linear_kernel_name(),
                     linear_kernel_name(at::kBFloat16), linear_kernel_name(at::kHalf), gemv_kernels().name);
}

// Each rank sends five characters: whether it has oneDNN, whether oneDNN is faster, its vector level, and the choices
// for bf16 and fp16. All ranks take the first rank's choices and the smallest vector level of all ranks.
void synchronize_kernel_choices(comm::Group& group) {
  if (group.size() == 1) return;
  const auto level = static_cast<char>('0' + static_cast<int>(vector_level()));
  const auto sign = [](bool choice) { return choice ? '1' : '0'; };
  const std::string own = {sign(has_onednn()), sign(onednn_is_faster()), level, sign(fp32_is_faster_for(at::kBFloat16)),
                           sign(fp32_is_faster_for(at::kHalf))};
  const auto all = comm::all_gather_bytes(group, own);
  const bool possible = std::ranges::all_of(all, [](const std::string& each) { return each.at(0) == '1'; });
  set_linear_choice(possible && all.front().at(1) == '1');
  set_fp32_choice(at::kBFloat16, all.front().at(3) == '1');
  set_fp32_choice(at::kHalf, all.front().at(4) == '1');
  char least = level;
  for (const auto& each : all) least = std::min(least, each.at(2));
  set_vector_level(static_cast<VectorLevel>(least - '0'));
}

namespace {

// oneDNN copies a first operand that is a transposed view, and this copy is slow. So transpose_matrix() copies the
// operand here, where its loops support the shape, the dtype and the processor.
at::Tensor dense_left(const at::Tensor& a) {
  const bool is_transposed = a.stride(0) == 1 && a.stride(1) >= a.size(0);
  if (!is_transposed || a.size(0) % 16 != 0 || a.size(1) % 16 != 0 || !supports_elementwise_kernels(a)) return a;
  return transpose_matrix(a.t());
}

}  // namespace

at::Tensor product_nt(const at::Tensor& a, const at::Tensor& b) {
  const bool large = a.size(0) >= kMinRows && b.size(0) >= kMinRows && a.size(1) >= kMinRows;
  if (large && is_plain_cpu_float(a) && is_plain_cpu_float(b) && onednn_is_faster()) {
    at::AutoDispatchBelowADInplaceOrView guard;
    return onednn_product(dense_left(a), b, {});
  }
  if (product_in_fp32(a, b, a.size(0))) return product_nt(a.to(at::kFloat), b.to(at::kFloat)).to(a.scalar_type());
  return at::mm(a, b.t());
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const auto optional_bias = bias.defined() ? OptionalTensor(bias) : std::nullopt;
  auto* const kept = kernels::ActivationCheckpointCache::current();
  if (kept == nullptr || !kept->caches_next_product()) return call_linear(x, weight, optional_bias);
  if (kept->mode() == kernels::ActivationCheckpointCache::Mode::kReplay) {
    return LinearFunction::apply(x, weight, optional_bias, kept->next().at(0));
  }
  const auto y = call_linear(x, weight, optional_bias);
  kept->keep({y});
  return y;
}

}  // namespace tessera::kernels
