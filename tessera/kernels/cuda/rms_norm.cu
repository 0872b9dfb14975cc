#include "tessera/kernels/cuda/elements.cuh"
#include "tessera/kernels/cuda/launchers.h"

namespace tessera::kernels::cuda {
namespace {

constexpr int kMaxThreads = 512;
// The number of blocks of the backward kernel is the same on every GPU, so that sums have one order on all of them.
constexpr int64_t kBackwardBlocks = 256;

// Each thread block normalises one row at a time.
template <int kPack, class T>
__global__ void norm_kernel(const T* x, const float* factors, float eps, bool rounds_first, T* y, float* inverse_rms,
                            int64_t rows, int64_t width) {
  __shared__ float shared[kWarp];
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T* from = x + row * width;
    float squares = 0;
    for (int64_t at = int64_t{threadIdx.x} * kPack; at < width; at += int64_t{blockDim.x} * kPack) {
      const auto pack = pack_at<kPack>(from + at);
      for (int i = 0; i < kPack; ++i) squares += wide(pack.at[i]) * wide(pack.at[i]);
    }
    // The loop below reads the row a second time, usually from the cache.
    const float inverse = 1.0F / sqrtf(block_sum(squares, shared) / static_cast<float>(width) + eps);
    if (threadIdx.x == 0) inverse_rms[row] = inverse;
    for (int64_t at = int64_t{threadIdx.x} * kPack; at < width; at += int64_t{blockDim.x} * kPack) {
      const auto pack = pack_at<kPack>(from + at);
      Pack<T, kPack> result;
      for (int i = 0; i < kPack; ++i) {
        const float normed = wide(pack.at[i]) * inverse;
        result.at[i] = narrow<T>(factors[at + i] * (rounds_first ? rounded<T>(normed) : normed));
      }
      store_pack<kPack>(y + row * width + at, result);
    }
  }
}

// With g = grad, f = factors and n = x * inverse_rms: grad_x = inverse_rms * (g f - n mean(g f n)). Each thread block
// adds g n to its own row of `partial`. Each element of this row is updated by only one thread of the block, so no
// atomics are needed.
template <int kPack, class T>
__global__ void norm_backward_kernel(const T* grad, const T* x, const float* factors, const float* inverse_rms,
                                     T* grad_x, float* partial, int64_t rows, int64_t width) {
  __shared__ float shared[kWarp];
  float* sums = partial + int64_t{blockIdx.x} * width;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const T *g_row = grad + row * width, *x_row = x + row * width;
    const float inverse = inverse_rms[row];
    float dot = 0;
    for (int64_t at = int64_t{threadIdx.x} * kPack; at < width; at += int64_t{blockDim.x} * kPack) {
      const auto g = pack_at<kPack>(g_row + at), from = pack_at<kPack>(x_row + at);
      for (int i = 0; i < kPack; ++i) dot += wide(g.at[i]) * factors[at + i] * wide(from.at[i]);
    }
    const float mean_gradient = block_sum(dot, shared) * inverse * inverse / static_cast<float>(width);
    const bool first = row == blockIdx.x;
    for (int64_t at = int64_t{threadIdx.x} * kPack; at < width; at += int64_t{blockDim.x} * kPack) {
      const auto g = pack_at<kPack>(g_row + at), from = pack_at<kPack>(x_row + at);
      Pack<T, kPack> result;
      for (int i = 0; i < kPack; ++i) {
        const float gradient = wide(g.at[i]), value = wide(from.at[i]);
        result.at[i] = narrow<T>(inverse * (gradient * factors[at + i] - value * mean_gradient));
        // For its first row a block writes the sums instead of adding, so `partial` needs no initialisation.
        sums[at + i] = (first ? 0.0F : sums[at + i]) + gradient * value * inverse;
      }
      store_pack<kPack>(grad_x + row * width + at, result);
    }
  }
}

template <int kPack, class T>
void run_norm(const T* x, const float* factors, float eps, bool rounds_first, T* y, float* inverse_rms, int64_t rows,
              int64_t width, cudaStream_t stream) {
  launch(norm_kernel<kPack, T>, blocks_for(rows), threads_for(width / kPack, kMaxThreads), stream, x, factors, eps,
         rounds_first, y, inverse_rms, rows, width);
}

template <class T>
void norm_of(const void* from, const float* factors, float eps, bool rounds_first, void* to, float* inverse_rms,
             int64_t rows, int64_t width, cudaStream_t stream) {
  const auto* x = static_cast<const T*>(from);
  auto* y = static_cast<T*>(to);
  if (is_packable(x, width) && is_packable(y, width)) {
    run_norm<kWidest<T>>(x, factors, eps, rounds_first, y, inverse_rms, rows, width, stream);
  } else {
    run_norm<1>(x, factors, eps, rounds_first, y, inverse_rms, rows, width, stream);
  }
}

template <int kPack, class T>
void run_norm_backward(const T* grad, const T* x, const float* factors, const float* inverse_rms, T* grad_x,
                       float* partial, int64_t rows, int64_t width, cudaStream_t stream) {
  launch(norm_backward_kernel<kPack, T>, static_cast<unsigned>(rms_norm_blocks(rows)),
         threads_for(width / kPack, kMaxThreads), stream, grad, x, factors, inverse_rms, grad_x, partial, rows, width);
}

template <class T>
void norm_backward_of(const void* grad, const void* from, const float* factors, const float* inverse_rms, void* to,
                      float* partial, int64_t rows, int64_t width, cudaStream_t stream) {
  const auto *g = static_cast<const T*>(grad), *x = static_cast<const T*>(from);
  auto* grad_x = static_cast<T*>(to);
  if (is_packable(g, width) && is_packable(x, width) && is_packable(grad_x, width)) {
    run_norm_backward<kWidest<T>>(g, x, factors, inverse_rms, grad_x, partial, rows, width, stream);
  } else {
    run_norm_backward<1>(g, x, factors, inverse_rms, grad_x, partial, rows, width, stream);
  }
}

}  // namespace

int64_t rms_norm_blocks(int64_t rows) { return rows < kBackwardBlocks ? rows : kBackwardBlocks; }

cudaError_t launch_rms_norm(ElementType element, const void* x, const float* factors, float eps, bool rounds_first,
                            void* y, float* inverse_rms, int64_t rows, int64_t width, cudaStream_t stream) {
  element == ElementType::kFloat
      ? norm_of<float>(x, factors, eps, rounds_first, y, inverse_rms, rows, width, stream)
      : norm_of<__nv_bfloat16>(x, factors, eps, rounds_first, y, inverse_rms, rows, width, stream);
  return cudaGetLastError();
}

cudaError_t launch_rms_norm_backward(ElementType element, const void* grad, const void* x, const float* factors,
                                     const float* inverse_rms, void* grad_x, float* partial, int64_t rows,
                                     int64_t width, cudaStream_t stream) {
  element == ElementType::kFloat
      ? norm_backward_of<float>(grad, x, factors, inverse_rms, grad_x, partial, rows, width, stream)
      : norm_backward_of<__nv_bfloat16>(grad, x, factors, inverse_rms, grad_x, partial, rows, width, stream);
  return cudaGetLastError();
}

}  // namespace tessera::kernels::cuda
