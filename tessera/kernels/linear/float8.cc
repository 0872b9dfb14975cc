#include "tessera/kernels/linear/float8.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include "tessera/base/error.h"
#include "tessera/kernels/dispatch/device_kernels.h"

namespace tessera::kernels {
namespace {

constexpr double kLeastAmax = 1e-12;
constexpr int64_t kTile = 16;  // _scaled_mm needs sizes that are multiples of it

double largest_of_float8(c10::ScalarType dtype) {
  if (dtype == at::kFloat8_e4m3fn) return 448;
  TESSERA_CHECK(dtype == at::kFloat8_e5m2, ErrorKind::kInternal,
                "[kernels.float8] found {}, wanted float8_e4m3fn or float8_e5m2", c10::toString(dtype));
  return 57344;
}

// Returns data in row-major memory, padded with zeros to a multiple of kTile columns and, with rows_too, rows.
at::Tensor in_tiles(const at::Tensor& data, bool rows_too) {
  const auto missing = [](int64_t size) { return (kTile - size % kTile) % kTile; };
  const int64_t columns = missing(data.size(1)), rows = rows_too ? missing(data.size(0)) : 0;
  const auto whole = data.contiguous();
  if (columns == 0 && rows == 0) return whole;
  return at::constant_pad_nd(whole.view(at::kByte), {0, columns, 0, rows}).view(data.scalar_type());
}

// _scaled_mm takes a row-major a, a column-major b, and the inverse scales. The padded columns of a and b add 0 to the
// sums. The padded rows of b give additional columns of the result, which are cut off.
at::Tensor native_product(const Float8Tensor& a, const Float8Tensor& b, c10::ScalarType dtype) {
  const auto y = at::_scaled_mm(in_tiles(a.data, false), in_tiles(b.data, true).t(), a.scale.reciprocal(),
                                b.scale.reciprocal(), /*bias=*/std::nullopt, /*scale_result=*/std::nullopt, dtype,
                                /*use_fast_accum=*/false);
  return y.size(1) == b.data.size(0) ? y : y.narrow(1, 0, b.data.size(0)).contiguous();
}

}  // namespace

at::Tensor Float8Tensor::value() const { return data.to(at::kFloat).div_(scale); }

// The scale is computed in float64 as torchao does. amax has a lower bound, so that zeros get a finite scale.
Float8Tensor to_float8(const at::Tensor& tensor, c10::ScalarType dtype) {
  const c10::NoGradGuard no_grad;
  const double largest = largest_of_float8(dtype);
  if (tensor.numel() == 0) return {tensor.to(dtype), at::ones({}, tensor.options().dtype(at::kFloat))};
  const at::Tensor amax = tensor.abs().max().to(at::kDouble).clamp_min(kLeastAmax);
  const at::Tensor scale = amax.reciprocal().mul(largest).to(at::kFloat);
  return {tensor.to(at::kFloat).mul(scale).clamp(-largest, largest).to(dtype), scale};
}

bool has_float8_products(c10::Device device) {
  static DeviceKernels native{"aten::_scaled_mm"};
  return native.work_on(device, at::kFloat8_e4m3fn, [&] {
    const auto zeros = at::zeros({kTile, kTile}, at::TensorOptions(at::kByte).device(device));
    const Float8Tensor none{zeros.view(at::kFloat8_e4m3fn), at::ones({}, zeros.options().dtype(at::kFloat))};
    native_product(none, none, at::kFloat);
  });
}

at::Tensor float8_product(const Float8Tensor& a, const Float8Tensor& b, c10::ScalarType dtype) {
  const c10::NoGradGuard no_grad;
  const bool empty = a.data.numel() == 0 || b.data.numel() == 0;
  if (!empty && has_float8_products(a.data.device())) return native_product(a, b, dtype);
  return a.value().mm(b.value().t()).to(dtype);
}

}  // namespace tessera::kernels
