// Composite operations whose decomposition in PyTorch does not work for DTensors. The functions here compose them from
// operations that have sharding rules. They are registered at the autograd key, too, so autograd differentiates the
// operations that they call.
#include <ATen/ATen.h>
#include <ATen/InferSize.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorUtils.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/_scaled_dot_product_attention_math_native.h>
#include <ATen/ops/cross_entropy_loss_native.h>
#include <ATen/ops/cumprod_backward_native.h>
#include <ATen/ops/pad_native.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <limits>
#include <numbers>

#include "tessera/base/error.h"
#include "tessera/dtensor/dispatch/dispatch.h"
#include "tessera/dtensor/redistribute/autograd.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/dtensor/tensor/local_tensor.h"

namespace tessera {

namespace {

// PyTorch's value_selecting_reduction_backward writes into at::zeros(sizes, options), which would be a plain tensor.
// This function makes the zeros with new_zeros() of the gradient, so they are a DTensor like the gradient.
at::Tensor value_selecting_reduction_backward(const at::Tensor& gradient, int64_t dim, const at::Tensor& indices,
                                              c10::SymIntArrayRef sizes, bool keepdim) {
  const bool add_dim = !keepdim && !sizes.empty();
  const at::Tensor values = add_dim ? gradient.unsqueeze(dim) : gradient;
  const at::Tensor where = add_dim ? indices.unsqueeze(dim) : indices;
  return values.new_zeros(C10_AS_INTARRAYREF_SLOW(sizes)).scatter(dim, where, values);
}

// PyTorch's cummaxmin_backward writes into at::zeros(sizes, options), which would be a plain tensor. This function
// makes the zeros with new_zeros() of the input, so they are a DTensor like the input.
at::Tensor cummaxmin_backward(const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& indices,
                              int64_t dim) {
  return input.numel() == 0 ? input.clone() : input.new_zeros(input.sizes()).scatter_add(dim, indices, gradient);
}

// For inputs with zeros PyTorch's cumprod_backward copies into at::zeros(), which would be a plain tensor. Here the
// gradient of input element k is the sum over the outputs i >= k of gradient[i] times the product of the input elements
// 0 ... i without k.
at::Tensor cumprod_backward(const at::Tensor& gradient, const at::Tensor& input, int64_t dim,
                            const at::Tensor& output) {
  const int64_t size = input.dim() == 0 ? 1 : input.size(dim);
  if (size <= 1 || !c10::GradMode::is_enabled() || !input.eq(0).any().item<bool>()) {
    return at::native::cumprod_backward(gradient, input, dim, output);
  }
  std::vector<at::Tensor> places;
  for (int64_t k = 0; k < size; ++k) {
    const at::Tensor before = input.narrow(dim, 0, k).prod(dim, /*keepdim=*/true);
    const at::Tensor after = input.narrow(dim, k + 1, size - k - 1).cumprod(dim);
    const at::Tensor others = at::cat({before, before * after}, dim);
    places.push_back((gradient.narrow(dim, k, size - k) * others.conj()).sum(dim));
  }
  return at::stack(places, dim);
}

// PyTorch's gather_backward adds in place to gradient.new_zeros(). If these zeros have the shape of the gradient they
// also have its placements, and an in-place operation cannot redistribute the tensor that it writes. So scatter_add is
// used here, which returns a new tensor.
at::Tensor gather_backward(const at::Tensor& gradient, const at::Tensor& self, int64_t dim, const at::Tensor& index,
                           bool) {
  return gradient.new_zeros(self.sizes()).scatter_add(dim, index, gradient);
}

at::Tensor index_select_backward(const at::Tensor& gradient, c10::SymIntArrayRef sizes, int64_t dim,
                                 const at::Tensor& index) {
  return gradient.new_zeros(C10_AS_INTARRAYREF_SLOW(sizes)).index_add(dim, index, gradient);
}

// Reduces a Partial tensor once, so that its consumers need not reduce it each.
at::Tensor without_partial(const at::Tensor& tensor) {
  return redistribute(tensor, partial_to_replicated(placements(tensor)));
}

// mvlgamma(partial, p). PyTorch's derivative of mvlgamma adds at::arange(p), which would be a plain tensor. So mvlgamma
// is computed as a sum of lgamma() calls, which autograd differentiates one by one.
at::Tensor log_multigamma(const at::Tensor& partial, int64_t p) {
  const at::Tensor self = without_partial(partial);
  at::Tensor sum = self.lgamma();
  for (int64_t j = 1; j < p; ++j) sum = sum + (self - static_cast<double>(j) / 2).lgamma();
  return sum + static_cast<double>(p * (p - 1)) / 4 * std::log(std::numbers::pi);
}

at::Tensor& mvlgamma_(at::Tensor& self, int64_t p) { return self.copy_(log_multigamma(self.clone(), p)); }

// PyTorch's _fused_rms_norm adds eps in place to the mean of squares. The mean is Partial if a normalized dim is
// sharded, and an in-place operation cannot redistribute it. Here eps is added out of place.
std::tuple<at::Tensor, at::Tensor> fused_rms_norm(const at::Tensor& input, c10::IntArrayRef normalized_shape,
                                                  const std::optional<at::Tensor>& weight, std::optional<double> eps) {
  const auto type = input.scalar_type();
  const at::Tensor x = input.to(at::toOpMathType(type));
  std::vector<int64_t> dims;
  for (size_t i = 0; i < normalized_shape.size(); ++i) dims.push_back(input.dim() - 1 - static_cast<int64_t>(i));
  const double smallest = type == at::kDouble ? std::numeric_limits<double>::epsilon()
                                              : static_cast<double>(std::numeric_limits<float>::epsilon());
  const at::Tensor scale = x.pow(2).mean(dims, /*keepdim=*/true).add(eps.value_or(smallest)).rsqrt();
  const at::Tensor normal = x * scale;
  return {(weight && weight->defined() ? normal * *weight : normal).to(type).contiguous(), scale};
}

at::Tensor rms_norm(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                    const std::optional<at::Tensor>& weight, std::optional<double> eps) {
  return std::get<0>(fused_rms_norm(input, C10_AS_INTARRAYREF_SLOW(normalized_shape), weight, eps));
}

// PyTorch's _pad_circular copies slices into at::empty(), which would be a plain tensor. This function joins the slices
// by at::cat(), so the result is a DTensor like `self`.
at::Tensor pad_circular(const at::Tensor& self, c10::SymIntArrayRef symbolic) {
  const auto pad = C10_AS_INTARRAYREF_SLOW(symbolic);
  at::Tensor padded = self;
  for (size_t i = 0; i + 1 < pad.size(); i += 2) {
    const int64_t dim = self.dim() - 1 - static_cast<int64_t>(i / 2);
    const int64_t left = pad[i];
    const int64_t right = pad[i + 1];
    const int64_t size = self.size(dim) + std::min<int64_t>(left, 0) + std::min<int64_t>(right, 0);
    TESSERA_CHECK(size > 0 && left <= self.size(dim) && right <= self.size(dim), ErrorKind::kShape,
                  "[dtensor.pad] circular padding [{}] of shape [{}]: found paddings {} and {} for a dim of size {}, "
                  "wanted at most the size each and a positive size of the result. Pad less.",
                  fmt::join(pad, ", "), fmt::join(self.sizes(), ", "), left, right, self.size(dim));
    const at::Tensor body = size == self.size(dim) ? padded : padded.narrow(dim, std::max<int64_t>(-left, 0), size);
    std::vector<at::Tensor> parts;
    if (left > 0) parts.push_back(body.narrow(dim, size - left, left));
    parts.push_back(body);
    if (right > 0) parts.push_back(body.narrow(dim, 0, right));
    padded = parts.size() == 1 ? body : at::cat(parts, dim);
  }
  return padded.is_same(self) ? self.clone() : padded;
}

// Where the strides allow it, PyTorch's reshape returns a view, which must share the tensor's memory. For a DTensor
// this is an error if an unevenly sharded dim would have to be gathered. This reshape calls _reshape_alias instead,
// whose rule may gather the dim and return a view of the gathered copy.
at::Tensor reshape(const at::Tensor& self, c10::SymIntArrayRef symbolic) {
  const at::DimVector sizes = at::infer_size_dv(C10_AS_INTARRAYREF_SLOW(symbolic), self.numel());
  const auto strides = at::detail::computeStride(self.sizes(), self.strides(), sizes);
  return strides ? at::_reshape_alias(self, sizes, *strides)
                 : at::_unsafe_view(self.clone(at::MemoryFormat::Contiguous), sizes);
}

// PyTorch's flatten calls at::native::reshape without the dispatcher, so it would not use reshape() above. This flatten
// calls reshape through the dispatcher.
at::Tensor flatten(const at::Tensor& self, int64_t first, int64_t last) {
  const int64_t begin = at::maybe_wrap_dim(first, self.dim());
  const int64_t end = at::maybe_wrap_dim(last, self.dim());
  TESSERA_CHECK(
      begin <= end, ErrorKind::kShape,
      "[dtensor.flatten] found dims {} to {}, wanted a range: flatten() has invalid args: start_dim cannot come "
      "after end_dim.",
      first, last);
  if (self.dim() == 0) return self.reshape({1});
  if (begin == end) return self;
  std::vector<int64_t> sizes(self.sizes().begin(), self.sizes().begin() + begin);
  sizes.push_back(c10::multiply_integers(self.sizes().begin() + begin, self.sizes().begin() + end + 1));
  sizes.insert(sizes.end(), self.sizes().begin() + end + 1, self.sizes().end());
  return self.reshape(sizes);
}

// As in PyTorch, ravel copies a 1-d tensor whose elements are not adjacent in memory. reshape alone would return a view
// of it.
at::Tensor ravel(const at::Tensor& self) { return self.contiguous().reshape({-1}); }

// Calls sub with the operands in the order (other, self), because their order decides the strides of the result.
at::Tensor rsub(const at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
  return at::sub(other, self, alpha);
}

at::Tensor pad(const at::Tensor& self, c10::SymIntArrayRef pad, std::string_view mode, std::optional<double> value) {
  const bool known = mode == "constant" || mode == "reflect" || mode == "replicate" || mode == "circular";
  TESSERA_CHECK(
      known, ErrorKind::kShape,
      "[dtensor.pad] Unrecognized padding mode {}: wanted constant, reflect, replicate or circular. Use one of "
      "these.",
      mode);
  return at::native::pad_symint(self, pad, mode, value);
}

// PyTorch's derivative of linalg_matrix_exp copies blocks into at::zeros(), which would be a plain tensor. The backward
// here uses PyTorch's formula: for input A and output gradient G the gradient is the upper right block of the matrix
// exponential of [[A^H, G], [0, A^H]].
struct MatrixExp : torch::autograd::Function<MatrixExp> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& self) {
    ctx->save_for_backward({self});
    at::AutoDispatchBelowADInplaceOrView below;
    return at::linalg_matrix_exp(self);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list gradients) {
    const at::Tensor transposed = ctx->get_saved_variables()[0].mH();
    const at::Tensor& gradient = gradients[0];
    const int64_t size = transposed.size(-1);
    const at::Tensor above = at::cat({transposed, gradient}, -1);
    const at::Tensor below = at::cat({at::zeros_like(gradient), transposed}, -1);
    return {at::linalg_matrix_exp(at::cat({above, below}, -2)).narrow(-2, 0, size).narrow(-1, size, size)};
  }
};

at::Tensor matrix_exp(const at::Tensor& self) { return MatrixExp::apply(self); }

// PyTorch's derivative of trace fills the diagonal of a plain tensor of zeros. Trace::backward() calls
// at::diagonal_backward() instead, which has a sharding rule, so the gradient is a DTensor.
struct Trace : torch::autograd::Function<Trace> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& self) {
    ctx->saved_data["sizes"] = self.sizes().vec();
    ctx->set_materialize_grads(false);
    at::AutoDispatchBelowADInplaceOrView below;
    return at::trace(self);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list gradients) {
    if (!gradients[0].defined()) return {at::Tensor()};
    const auto sizes = ctx->saved_data["sizes"].toIntVector();
    const at::Tensor diagonal = gradients[0].expand({std::min(sizes[0], sizes[1])});
    return {at::diagonal_backward(diagonal, sizes, 0, 0, 1)};
  }
};

at::Tensor trace(const at::Tensor& self) { return Trace::apply(self); }

// For real numbers sign is called instead of sgn, because PyTorch's derivative of sgn would be a plain tensor of zeros
// and not a DTensor.
at::Tensor sgn(c10::DispatchKeySet keys, const at::Tensor& self) {
  if (!self.is_complex()) return self.sign();
  return at::_ops::sgn::redispatch(keys_of_all_backends(keys), self);
}

at::Tensor& sgn_(c10::DispatchKeySet keys, at::Tensor& self) {
  if (!self.is_complex()) return self.sign_();
  return at::_ops::sgn_::redispatch(keys_of_all_backends(keys), self);
}

// In PyTorch the derivative of copysign with respect to `other` is a plain tensor of zeros. Here it is a DTensor.
struct CopySign : torch::autograd::Function<CopySign> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& self, const at::Tensor& other) {
    at::Tensor result;
    {
      at::AutoDispatchBelowADInplaceOrView below;
      result = at::copysign(self, other);
    }
    if (self.requires_grad()) ctx->save_for_backward({self, result});
    ctx->saved_data["sizes"] = other.sizes().vec();
    ctx->saved_data["dtype"] = static_cast<int64_t>(other.scalar_type());
    ctx->set_materialize_grads(false);
    return result;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list gradients) {
    if (!gradients[0].defined()) return {at::Tensor(), at::Tensor()};
    const auto saved = ctx->get_saved_variables();
    const auto dtype = static_cast<at::ScalarType>(ctx->saved_data["dtype"].toInt());
    at::Tensor of_self;
    if (!saved.empty()) of_self = gradients[0] * (saved[1] / saved[0]).masked_fill(saved[0].eq(0), 0);
    return {of_self, gradients[0].new_zeros(ctx->saved_data["sizes"].toIntVector(), at::TensorOptions().dtype(dtype))};
  }
};

bool wants_gradient(const at::Tensor& tensor) { return at::GradMode::is_enabled() && tensor.requires_grad(); }

at::Tensor with_sign(c10::DispatchKeySet keys, const at::Tensor& self, const at::Tensor& other) {
  if (wants_gradient(other)) return CopySign::apply(self, other);
  return at::_ops::copysign_Tensor::redispatch(keys_of_all_backends(keys), self, other);
}

at::Tensor& with_sign_(c10::DispatchKeySet keys, at::Tensor& self, const at::Tensor& other) {
  if (wants_gradient(other)) return self.copy_(CopySign::apply(self.clone(), other));
  return at::_ops::copysign__Tensor::redispatch(keys_of_all_backends(keys), self, other);
}

// as_strided is allowed only with the shape, strides and offset that self has already; derivative formulas call it in
// this way. Autograd then records alias().
at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                      std::optional<c10::SymInt> offset) {
  check_as_strided("aten::as_strided", self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
                   offset ? offset->expect_int() : 0);
  return at::alias(self);
}

// Returns its input unchanged. Its backward converts a plain gradient to a replicated DTensor.
struct DTensorGradient : torch::autograd::Function<DTensorGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& self) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->set_materialize_grads(false);
    ctx->saved_data["like"] = self.detach();
    return at::alias(self);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    if (grads[0].defined()) grads[0] = replicate_like(grads[0], ctx->saved_data["like"].toTensor());
    return grads;
  }
};

// cat accepts operands of shape [0] together with operands of any other shape. PyTorch's derivative of cat gives them
// the gradient at::zeros({0}), a plain tensor, which DTensorGradient converts.
at::Tensor cat(c10::DispatchKeySet keys, const at::ITensorListRef& operands, int64_t dim) {
  const auto next = keys_of_all_backends(keys);
  const auto is_empty = [](const at::Tensor& tensor) {
    return tensor.dim() == 1 && tensor.size(0) == 0 && tensor.requires_grad() && is_dtensor(tensor);
  };
  if (!c10::GradMode::is_enabled() || std::ranges::none_of(operands, is_empty)) {
    return at::_ops::cat::redispatch(next, operands, dim);
  }
  std::vector<at::Tensor> tensors;
  for (const at::Tensor& tensor : operands) {
    tensors.push_back(is_empty(tensor) ? DTensorGradient::apply(tensor) : tensor);
  }
  return at::_ops::cat::redispatch(next, tensors, dim);
}

// The term that label smoothing adds to the cross entropy: the negative log-probabilities summed over all classes.
// PyTorch's implementation masks the sum over classes in place, which fails if the sum is Partial. It also takes the
// mean of a masked_select, whose shape depends on values.
at::Tensor smooth_loss(const at::Tensor& log_probabilities, const at::Tensor& target, const at::Tensor& weight,
                       int64_t reduction, int64_t ignored_index) {
  const int64_t class_dim = log_probabilities.dim() == 1 ? 0 : 1;
  at::Tensor terms = log_probabilities;
  if (weight.defined()) {
    std::vector<int64_t> shape(static_cast<size_t>(terms.dim()), 1);
    shape[static_cast<size_t>(class_dim)] = weight.size(0);
    terms = terms * weight.view(shape);
  }
  const at::Tensor ignored = target.eq(ignored_index);
  const at::Tensor rows = (-terms.sum(class_dim)).masked_fill(ignored, 0);
  if (reduction == at::Reduction::None) return rows;
  if (reduction == at::Reduction::Sum) return rows.sum();
  at::Tensor total = ignored.logical_not().sum().to(rows.scalar_type());
  if (weight.defined()) {
    total = weight.gather(0, target.masked_fill(ignored, 0).flatten()).masked_fill(ignored.flatten(), 0).sum();
  }
  return rows.sum() / total;
}

at::Tensor cross_entropy_loss(const at::Tensor& self, const at::Tensor& target, const std::optional<at::Tensor>& weight,
                              int64_t reduction, c10::SymInt ignore_index, double label_smoothing) {
  const bool of_classes = self.sizes() != target.sizes();  // else the targets are probabilities
  if (label_smoothing <= 0 || label_smoothing > 1 || !of_classes || !is_dtensor(self)) {
    return at::native::cross_entropy_loss_symint(self, target, weight, reduction, std::move(ignore_index),
                                                 label_smoothing);
  }
  const int64_t class_dim = self.dim() == 1 ? 0 : 1;
  const int64_t ignored = ignore_index.expect_int();
  const at::Tensor log_probabilities = at::log_softmax(self, class_dim, self.scalar_type());
  const at::Tensor loss = at::nll_loss_nd(log_probabilities, target, weight, reduction, ignored);
  const at::Tensor weights = weight && weight->defined() ? replicate_like(*weight, self) : at::Tensor();
  const at::Tensor smooth = smooth_loss(log_probabilities, replicate_like(target, self), weights, reduction, ignored);
  return (1 - label_smoothing) * loss + smooth * (label_smoothing / static_cast<double>(self.size(class_dim)));
}

// PyTorch's one_hot scatters into at::zeros(sizes, options), which would be a plain tensor. Here each index is compared
// with all classes, so the result is sharded as the indices are.
at::Tensor one_hot(const at::Tensor& indices, int64_t num_classes) {
  TESSERA_CHECK(indices.scalar_type() == at::kLong, ErrorKind::kShape,
                "[dtensor.one_hot] found indices of {}: one_hot is only applicable to index tensor of type LongTensor.",
                c10::toString(indices.scalar_type()));
  TESSERA_CHECK(indices.numel() > 0 || num_classes > 0, ErrorKind::kShape,
                "[dtensor.one_hot] Can not infer total number of classes from empty tensor.");
  const at::Tensor self = without_partial(indices);
  int64_t classes = num_classes;
  if (self.numel() > 0) {
    const auto least = self.min().item<int64_t>(), most = self.max().item<int64_t>();  // the same on all ranks
    TESSERA_CHECK(least >= 0, ErrorKind::kShape, "[dtensor.one_hot] found index {}: Class values must be non-negative.",
                  least);
    classes = num_classes == -1 ? most + 1 : num_classes;
    TESSERA_CHECK(classes > most, ErrorKind::kShape,
                  "[dtensor.one_hot] found index {} for {} classes: Class values must be smaller than num_classes.",
                  most, classes);
  }
  return self.unsqueeze(-1)
      .eq(replicate_like(at::arange(classes, at::TensorOptions(at::kLong).device(self.device())), self))
      .to(at::kLong);
}

// PyTorch's _scaled_dot_product_attention_math makes the causal mask with at::ones(options). For DTensors this mask
// would be a plain tensor, so the mask is made here as a replicated DTensor and passed to PyTorch's function.
std::tuple<at::Tensor, at::Tensor> attention_math(const at::Tensor& query, const at::Tensor& key,
                                                  const at::Tensor& value, const std::optional<at::Tensor>& mask,
                                                  double dropout, bool causal,
                                                  const std::optional<at::Tensor>& dropout_mask,
                                                  std::optional<double> scale, bool grouped) {
  const bool masked = mask && mask->defined();  // mask and is_causal together are an error of PyTorch's function
  if (!causal || masked || !is_dtensor(query)) {
    return at::native::_scaled_dot_product_attention_math(query, key, value, mask, dropout, causal, dropout_mask, scale,
                                                          grouped);
  }
  const auto options = at::TensorOptions().dtype(query.scalar_type()).device(query.device());
  const double never = -std::numeric_limits<double>::infinity();
  const at::Tensor after = replicate_like(at::full({query.size(-2), key.size(-2)}, never, options).triu(1), query);
  return at::native::_scaled_dot_product_attention_math(query, key, value, after, dropout, false, dropout_mask, scale,
                                                        grouped);
}

}  // namespace

void check_as_strided(const std::string& op, const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides,
                      int64_t offset) {
  TESSERA_CHECK(self.sizes() == sizes && self.strides() == strides && offset == 0, ErrorKind::kShape,
                "Sharding dimension mismatch: [dtensor.dispatch] {}(self: [{}]): as_strided not supported with "
                "DTensor, except with the shape and strides that the tensor has already. Use view, transpose, slice or "
                "unfold, or work on to_local().",
                op, fmt::join(self.sizes(), ", "));
}

void register_composites(torch::Library& dtensor, torch::Library& autograd) {
  for (auto* library : {&dtensor, &autograd}) {
    library->impl("value_selecting_reduction_backward", TORCH_FN(value_selecting_reduction_backward));
    library->impl("cummaxmin_backward", TORCH_FN(cummaxmin_backward));
    library->impl("cumprod_backward", TORCH_FN(cumprod_backward));
    library->impl("gather_backward", TORCH_FN(gather_backward));
    library->impl("index_select_backward", TORCH_FN(index_select_backward));
    library->impl("rms_norm", TORCH_FN(rms_norm));
    library->impl("cross_entropy_loss", TORCH_FN(cross_entropy_loss));
    library->impl("_scaled_dot_product_attention_math", TORCH_FN(attention_math));
    library->impl("_fused_rms_norm", TORCH_FN(fused_rms_norm));
    library->impl("one_hot", TORCH_FN(one_hot));
    library->impl("pad", TORCH_FN(pad));
    library->impl("reshape", TORCH_FN(reshape));
    library->impl("flatten.using_ints", TORCH_FN(flatten));
    library->impl("ravel", TORCH_FN(ravel));
    library->impl("_pad_circular", TORCH_FN(pad_circular));
  }
  autograd.impl("cat", TORCH_FN(cat));
  autograd.impl("rsub.Tensor", TORCH_FN(rsub));
  autograd.impl("trace", TORCH_FN(trace));
  autograd.impl("copysign.Tensor", TORCH_FN(with_sign));
  autograd.impl("copysign_.Tensor", TORCH_FN(with_sign_));
  autograd.impl("sgn", TORCH_FN(sgn));
  autograd.impl("sgn_", TORCH_FN(sgn_));
  autograd.impl("mvlgamma", TORCH_FN(log_multigamma));
  autograd.impl("mvlgamma_", TORCH_FN(mvlgamma_));
  autograd.impl("linalg_matrix_exp", TORCH_FN(matrix_exp));
  autograd.impl("as_strided", TORCH_FN(as_strided));  // at the autograd key; the handler with this name is below it
}

}  // namespace tessera
