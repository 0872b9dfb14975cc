#include "tessera/kernels/attention/head_groups.h"

#include <ATen/ATen.h>

#include "tessera/kernels/dispatch/result_form.h"

namespace tessera::kernels {

at::Tensor repeat_heads(const at::Tensor& tensor, int64_t dim, int64_t heads) {
  if (tensor.size(dim) == heads) return tensor;
  const int64_t at = dim < 0 ? dim + tensor.dim() : dim;
  auto sizes = tensor.sizes().vec(), repeated = sizes;
  sizes.insert(sizes.begin() + at + 1, heads / tensor.size(at));
  repeated[at] = heads;
  return tensor.unsqueeze(at + 1).expand(sizes).reshape(repeated);
}

at::Tensor sum_heads(const at::Tensor& tensor, int64_t dim, int64_t groups) {
  if (tensor.size(dim) == groups) return tensor;
  const int64_t at = dim < 0 ? dim + tensor.dim() : dim;
  return tensor.to(wide_type(tensor.scalar_type())).unflatten(at, {groups, tensor.size(at) / groups}).sum(at + 1);
}

}  // namespace tessera::kernels
