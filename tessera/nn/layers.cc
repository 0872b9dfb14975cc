#include "tessera/nn/layers.h"

#include "tessera/kernels/linear.h"
#include "tessera/kernels/linear_cross_entropy.h"
#include "tessera/kernels/rms_norm.h"
#include "tessera/kernels/swiglu.h"

namespace tessera::nn {

Linear::Linear(int64_t in, int64_t out, bool with_bias, const ParameterOptions& options) {
  register_parameter("weight", weight, at::empty({out, in}, options.tensor_options()));
  if (with_bias) register_parameter("bias", bias, at::empty({out}, options.tensor_options()), /*decay=*/false);
}

at::Tensor Linear::forward(const at::Tensor& x) { return linear(x, weight, bias); }

Head::Head(int64_t width, int64_t classes, const ParameterOptions& options) {
  register_parameter("weight", weight, at::empty({classes, width}, options.tensor_options()));
}

at::Tensor Head::forward(const at::Tensor& x) { return tessera::linear(x, weight); }

at::Tensor Head::forward(const at::Tensor& x, const at::Tensor& labels) {
  return linear_cross_entropy(x.reshape({-1, x.size(-1)}), weight, labels.reshape({-1}));
}

Embedding::Embedding(int64_t rows, int64_t width, const ParameterOptions& options, int64_t padding_id)
    : padding_id_(padding_id) {
  register_parameter("weight", weight, at::empty({rows, width}, options.tensor_options()));
}

at::Tensor Embedding::forward(const at::Tensor& ids) { return at::embedding(weight, ids, padding_id_); }

RMSNorm::RMSNorm(int64_t width, double eps, const ParameterOptions& options) : eps_(eps) {
  register_parameter("weight", weight, at::empty({width}, options.tensor_options()), /*decay=*/false);
}

at::Tensor RMSNorm::forward(const at::Tensor& x) { return rms_norm(x, weight, eps_); }

MLP::MLP(int64_t width, int64_t inner, bool bias, const ParameterOptions& options) {
  register_module("gate_proj", gate_proj, std::make_shared<Linear>(width, inner, bias, options));
  register_module("up_proj", up_proj, std::make_shared<Linear>(width, inner, bias, options));
  register_module("down_proj", down_proj, std::make_shared<Linear>(inner, width, bias, options));
}

at::Tensor MLP::forward(const at::Tensor& x) { return (*down_proj)(swiglu((*gate_proj)(x), (*up_proj)(x))); }

}  // namespace tessera::nn
