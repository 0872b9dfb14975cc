// linear and matmul with operands of more than two dims. The leading dims are flattened, so that the operand is one
// matrix or one batch of matrices. An unevenly sharded dim can be flattened without communication only if it is the
// innermost of the flattened dims. Therefore this dim is first permuted to the innermost position, and the result is
// permuted back.
#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/ops/linear_native.h>
#include <ATen/ops/matmul_native.h>
#include <torch/library.h>

#include <numeric>

#include "tessera/base/error.h"
#include "tessera/dtensor/dispatch/dispatch.h"
#include "tessera/dtensor/rules/table.h"
#include "tessera/dtensor/tensor/dtensor.h"

namespace tessera {

namespace {

using Order = std::vector<int64_t>;

Order identity_order(int64_t ndim) {
  Order order(static_cast<size_t>(ndim));
  std::iota(order.begin(), order.end(), int64_t{0});
  return order;
}

Order inverse(const Order& order) {
  Order back(order.size());
  for (size_t i = 0; i < order.size(); ++i) back[static_cast<size_t>(order[i])] = static_cast<int64_t>(i);
  return back;
}

// Whether the first `count` dims can be flattened without communication after the dims are permuted to `order`.
bool can_flatten(const at::Tensor& tensor, int64_t count, const Order& order) {
  const Order back = inverse(order);
  Placements placements = impl_of(tensor)->placements();
  for (auto& placement : placements) {
    placement.dim =
        placement.is_any_shard() ? static_cast<int32_t>(back[static_cast<size_t>(placement.dim)]) : placement.dim;
  }
  std::vector<int64_t> from;
  for (const int64_t dim : order) from.push_back(tensor.size(dim));
  std::vector<int64_t> to(from.begin() + count, from.end());
  to.insert(to.begin(), c10::multiply_integers(from.begin(), from.begin() + count));
  return can_view(*impl_of(tensor)->mesh(), from, placements, to);
}

// Returns an order of the dims in which the first `count` dims can be flattened without communication; the other dims
// stay in place. Returns the present order if there is no such order.
Order flattenable_order(const at::Tensor& tensor, int64_t count) {
  const Order present = identity_order(tensor.dim());
  if (count < 2 || !is_dtensor(tensor) || can_flatten(tensor, count, present)) return present;
  for (const auto& placement : impl_of(tensor)->placements()) {
    if (placement.is_any_shard() && placement.dim < count) {
      Order order = present;
      order.erase(order.begin() + placement.dim);
      order.insert(order.begin() + count - 1, placement.dim);
      if (can_flatten(tensor, count, order)) return order;
    }
  }
  return present;
}

// Flattens all dims of the tensor but the last, calls `product` with this matrix [rows, columns], and restores the dims
// in the result. `product` must return a tensor whose first dim has the same rows.
template <class Product>
at::Tensor apply_to_rows(const at::Tensor& tensor, Product product) {
  const int64_t count = tensor.dim() - 1;
  const Order order = flattenable_order(tensor, count);
  const bool moves = order != identity_order(tensor.dim());
  const at::Tensor ordered = moves ? tensor.permute(order) : tensor;
  const at::Tensor result = product(ordered.reshape({-1, tensor.size(-1)}));
  std::vector<int64_t> sizes(ordered.sizes().begin(), ordered.sizes().end() - 1);
  Order back(order.begin(), order.end() - 1);
  if (result.dim() > 1) {
    sizes.push_back(result.size(-1));
    back.push_back(count);
  }
  const at::Tensor unfolded = result.reshape(sizes);
  return moves ? unfolded.permute(inverse(back)).contiguous() : unfolded;
}

// Returns product + bias with the dtype of the product. PyTorch adds the bias in place. Here the sum is a new tensor,
// because it may have other placements than the product, and is converted to the product's dtype.
at::Tensor plus_bias(const at::Tensor& product, const at::Tensor& bias) {
  const at::Tensor sum = product.add(bias);
  if (sum.scalar_type() == product.scalar_type()) return sum;
  TESSERA_CHECK(
      c10::canCast(sum.scalar_type(), product.scalar_type()), ErrorKind::kShape,
      "[dtensor.dispatch] aten::linear: the bias has dtype {}, which cannot be added to a product of dtype {}",
      c10::toString(bias.scalar_type()), c10::toString(product.scalar_type()));
  return sum.to(product.scalar_type());
}

at::Tensor linear_by_rows(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const bool has_bias = bias && bias->defined();
  const bool folds = input.dim() >= 3 && weight.dim() == 2 && input.size(-1) == weight.size(1) && input.numel() > 0;
  if (input.dim() != 2 && has_bias && (!folds || bias->scalar_type() != input.scalar_type())) {
    return plus_bias(at::matmul(input, weight.t()), *bias);
  }
  if (!folds) return at::native::linear(input, weight, bias);
  return apply_to_rows(input, [&](const at::Tensor& rows) { return at::native::linear(rows, weight, bias); });
}

at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const AllowGatheringViews views;
  return clone_gathered_view(linear_by_rows(input, weight, bias));
}

// Returns the product of two batches of matrices. Both operands have more than three dims; the last two are the matrix
// dims.
at::Tensor product_of_batches(const at::Tensor& self, const at::Tensor& other) {
  const auto batch_of = [](const at::Tensor& t) { return t.sizes().slice(0, static_cast<size_t>(t.dim() - 2)); };
  const std::vector<int64_t> batch = at::infer_size(batch_of(self), batch_of(other));
  const auto count = static_cast<int64_t>(batch.size());
  const auto expanded = [&](const at::Tensor& t) {
    std::vector<int64_t> sizes = batch;
    sizes.insert(sizes.end(), {t.size(-2), t.size(-1)});
    return t.sizes() == c10::IntArrayRef(sizes) ? t : t.expand(sizes);
  };
  const at::Tensor a = expanded(self);
  const at::Tensor b = expanded(other);
  const Order present = identity_order(count + 2);
  Order order = flattenable_order(a, count);
  order = order == present ? flattenable_order(b, count) : order;
  if (order == present) return at::native::matmul(self, other);
  return at::native::matmul(a.permute(order), b.permute(order)).permute(inverse(order)).contiguous();
}

at::Tensor product_of_folded(const at::Tensor& self, const at::Tensor& other) {
  if (self.numel() == 0 || other.numel() == 0) return at::native::matmul(self, other);
  if (self.dim() > 3 && other.dim() > 3) return product_of_batches(self, other);
  const bool folds = self.dim() > 2 && (other.dim() == 1 || other.dim() == 2) && self.size(-1) == other.size(0);
  if (!folds) return at::native::matmul(self, other);
  return apply_to_rows(self, [&](const at::Tensor& rows) { return at::native::matmul(rows, other); });
}

at::Tensor matmul(const at::Tensor& self, const at::Tensor& other) {
  const AllowGatheringViews views;
  return clone_gathered_view(product_of_folded(self, other));
}

}  // namespace

void register_folded_products(torch::Library& dtensor, torch::Library& autograd) {
  for (auto* library : {&dtensor, &autograd}) {
    library->impl("linear", TORCH_FN(linear));
    library->impl("matmul", TORCH_FN(matmul));
  }
}

}  // namespace tessera
