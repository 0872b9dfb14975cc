#include "tessera/kernels/rows/elementwise_kernels.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "tessera/base/error.h"
#include "tessera/kernels/dispatch/result_form.h"
#include "tessera/kernels/rows/cuda_elementwise_kernels.h"
#include "tessera/kernels/simd/lanes_avx2.h"
#include "tessera/kernels/simd/lanes_avx512.h"

namespace tessera::kernels {
namespace {

#ifdef TESSERA_HAS_LANES
constexpr int64_t kLoopElements = 1 << 14;  // least work of a thread

int64_t rows_at_once(int64_t width) { return std::max<int64_t>(1, kLoopElements / width); }

template <class Run>
void for_dtype_of(const at::Tensor& tensor, const Run& run) {
  tensor.scalar_type() == at::kFloat ? run(float()) : run(c10::BFloat16());
}

// elementwise_kernels_body.h is compiled twice, for AVX-512 and for AVX2. for_lanes() selects one of them at run time,
// so the library runs on processors without AVX-512.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // false positives in GCC 12's own intrinsics headers
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
namespace rows_avx512 {
using namespace lanes_avx512;
#include "tessera/kernels/rows/elementwise_kernels_body.h"
}  // namespace rows_avx512
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace rows_avx2 {
using namespace lanes_avx2;
#include "tessera/kernels/rows/elementwise_kernels_body.h"
}  // namespace rows_avx2
#pragma GCC pop_options
#pragma GCC diagnostic pop

at::Tensor gate_loop(Gate kind, const at::Tensor& gate, const at::Tensor& up) {
  auto y = at::empty_like(gate);
  for_dtype_of(gate, [&]<class T>(T) {
    const T *from = gate.const_data_ptr<T>(), *factor = up.const_data_ptr<T>();
    T* to = y.mutable_data_ptr<T>();
    const auto range = for_lanes(rows_avx512::gate_range<T>, rows_avx2::gate_range<T>);
    at::parallel_for(0, gate.numel(), kLoopElements,
                     [&](int64_t begin, int64_t end) { range(kind, from, factor, to, begin, end); });
  });
  return y;
}

std::tuple<at::Tensor, at::Tensor> gate_backward_loop(Gate kind, const at::Tensor& grad, const at::Tensor& gate,
                                                      const at::Tensor& up) {
  auto grad_gate = at::empty_like(gate), grad_up = at::empty_like(gate);
  for_dtype_of(gate, [&]<class T>(T) {
    const T *g = grad.const_data_ptr<T>(), *from = gate.const_data_ptr<T>(), *factor = up.const_data_ptr<T>();
    T *to_gate = grad_gate.mutable_data_ptr<T>(), *to_up = grad_up.mutable_data_ptr<T>();
    const auto range = for_lanes(rows_avx512::gate_backward_range<T>, rows_avx2::gate_backward_range<T>);
    at::parallel_for(0, gate.numel(), kLoopElements,
                     [&](int64_t begin, int64_t end) { range(kind, g, from, factor, to_gate, to_up, begin, end); });
  });
  return {grad_gate, grad_up};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_loop(const at::Tensor& x, const at::Tensor& factors, double eps,
                                                 bool rounds_first) {
  const int64_t width = x.size(-1), rows = x.numel() / width;
  auto y = at::empty_like(x);
  auto inverse_rms = at::empty(with_last(x.sizes(), 1), x.options().dtype(at::kFloat));
  for_dtype_of(x, [&]<class T>(T) {
    const T* from = x.const_data_ptr<T>();
    const float* by = factors.const_data_ptr<float>();
    T* to = y.mutable_data_ptr<T>();
    float* inverse = inverse_rms.mutable_data_ptr<float>();
    const auto norm_row = for_lanes(rows_avx512::norm_row<T>, rows_avx2::norm_row<T>);
    at::parallel_for(0, rows, rows_at_once(width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        norm_row(from + row * width, by, width, static_cast<float>(eps), rounds_first, to + row * width, inverse[row]);
      }
    });
  });
  return {y, inverse_rms};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward_loop(const at::Tensor& grad, const at::Tensor& x,
                                                          const at::Tensor& factors, const at::Tensor& inverse_rms) {
  const int64_t width = x.size(-1), rows = x.numel() / width;
  // The rows are divided into at most 64 blocks, each with its own partial sum of grad_weight. The division does not
  // depend on the number of threads, so the order of the sums does not, either.
  const int64_t block = std::max(rows_at_once(width), (rows + 63) / 64), blocks = (rows + block - 1) / block;
  auto grad_x = at::empty_like(x);
  auto partial = at::zeros({blocks, width}, x.options().dtype(at::kFloat));
  for_dtype_of(x, [&]<class T>(T) {
    const T *g = grad.const_data_ptr<T>(), *from = x.const_data_ptr<T>();
    const float *by = factors.const_data_ptr<float>(), *inverse = inverse_rms.const_data_ptr<float>();
    T* to = grad_x.mutable_data_ptr<T>();
    float* sums = partial.mutable_data_ptr<float>();
    const auto row_backward = for_lanes(rows_avx512::norm_row_backward<T>, rows_avx2::norm_row_backward<T>);
    at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin * block; row < std::min(rows, end * block); ++row) {
        row_backward(g + row * width, from + row * width, by, width, inverse[row], to + row * width,
                     sums + row / block * width);
      }
    });
  });
  return {grad_x, partial.sum(0)};
}

at::Tensor rotary_loop(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, float sign) {
  const int64_t tokens = x.size(1), heads = x.size(2), width = x.size(3);
  const int64_t angle_row = cos.size(0) == 1 ? 0 : tokens * (width / 2);
  auto y = at::empty_like(x);
  for_dtype_of(x, [&]<class T>(T) {
    const T* from = x.const_data_ptr<T>();
    const float *c = cos.const_data_ptr<float>(), *s = sin.const_data_ptr<float>();
    T* to = y.mutable_data_ptr<T>();
    const auto rotate_head = for_lanes(rows_avx512::rotate_head<T>, rows_avx2::rotate_head<T>);
    at::parallel_for(0, x.size(0) * tokens, 16, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const int64_t angle = token / tokens * angle_row + token % tokens * (width / 2);
        for (int64_t at = token * heads * width; at < (token + 1) * heads * width; at += width) {
          rotate_head(from + at, c + angle, s + angle, sign, width / 2, to + at);
        }
      }
    });
  });
  return y;
}

// Returns the loss of each row; the caller adds these losses. Each row is computed on its own, so the division of the
// rows among threads does not change any loss.
at::Tensor cross_entropy_loop(const at::Tensor& logits, const at::Tensor& labels, bool wants_gradient) {
  const int64_t rows = logits.size(0), classes = logits.size(1);
  auto losses = at::empty({rows}, logits.options());
  float *of = logits.mutable_data_ptr<float>(), *to = losses.mutable_data_ptr<float>();
  const auto label = labels.contiguous();
  const int64_t* classes_of = label.const_data_ptr<int64_t>();
  const auto softmax_cross_entropy_row =
      for_lanes(rows_avx512::softmax_cross_entropy_row, rows_avx2::softmax_cross_entropy_row);
  at::parallel_for(0, rows, rows_at_once(classes), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      to[row] = softmax_cross_entropy_row(of + row * classes, classes, classes_of[row], wants_gradient);
    }
  });
  return losses;
}

const ElementwiseKernels* cpu_elementwise_kernels() {
  static constexpr ElementwiseKernels kLoops{gate_loop,   gate_backward_loop, rms_norm_loop, rms_norm_backward_loop,
                                             rotary_loop, cross_entropy_loop};
  return has_lanes() ? &kLoops : nullptr;
}
#else
const ElementwiseKernels* cpu_elementwise_kernels() { return nullptr; }
#endif

const ElementwiseKernels* find_elementwise_kernels(c10::Device device) {
  if (device.is_cuda()) return cuda::cuda_elementwise_kernels();
  return device.is_cpu() ? cpu_elementwise_kernels() : nullptr;
}

}  // namespace

bool has_elementwise_kernels(c10::Device device, at::ScalarType type) {
  return (type == at::kFloat || type == at::kBFloat16) && find_elementwise_kernels(device) != nullptr;
}

bool supports_elementwise_kernels(const at::Tensor& tensor, int64_t lanes) {
  return has_elementwise_kernels(tensor.device(), tensor.scalar_type()) && tensor.numel() > 0 &&
         (!tensor.is_cpu() || lanes == 1 || tensor.size(-1) % lanes == 0);
}

const ElementwiseKernels& elementwise_kernels(c10::Device device) {
  const auto* const loops = find_elementwise_kernels(device);
  TESSERA_CHECK(loops != nullptr, ErrorKind::kInternal, "[kernels.elementwise] there are no loops for the device {}",
                device.str());
  return *loops;
}

#ifdef TESSERA_HAS_LANES
at::Tensor transpose_matrix(const at::Tensor& x) {
  const int64_t rows = x.size(0), columns = x.size(1), step = x.stride(0);
  auto y = at::empty({columns, rows}, x.options());
  const float* from = x.const_data_ptr<float>();
  float* to = y.mutable_data_ptr<float>();
  const auto range = for_lanes(rows_avx512::transpose_rows, rows_avx2::transpose_rows);
  constexpr int64_t kAtOnce = 16;  // columns: one cache line of each row
  at::parallel_for(0, columns / kAtOnce, std::max<int64_t>(1, kLoopElements / (kAtOnce * rows)),
                   [&](int64_t begin, int64_t end) { range(from, step, rows, to, begin * kAtOnce, end * kAtOnce); });
  return y;
}
#else
at::Tensor transpose_matrix(const at::Tensor&) {
  raise(ErrorKind::kInternal, "[kernels.elementwise] the loops were not compiled for this processor");
}
#endif

}  // namespace tessera::kernels
