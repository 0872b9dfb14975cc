#include "tessera/kernels/cuda/elements.cuh"
#include "tessera/kernels/cuda/launchers.h"

namespace tessera::kernels::cuda {
namespace {

constexpr int kMaxThreads = 256;

// Each thread block rotates one token at a time. Its threads divide the pairs (i, i + half) of all heads among them.
template <class T>
__global__ void rotary_kernel(const T* x, const float* cos, const float* sin, float sign, T* y, int64_t all_tokens,
                              int64_t tokens, int heads, int half, int64_t angle_row) {
  for (int64_t token = blockIdx.x; token < all_tokens; token += gridDim.x) {
    const int64_t angle = token / tokens * angle_row + token % tokens * half;
    const int64_t begin = token * heads * half * 2;
    for (int64_t pair = threadIdx.x; pair < int64_t{heads} * half; pair += blockDim.x) {
      const int head = static_cast<int>(pair) / half, i = static_cast<int>(pair) % half;
      const int64_t at = begin + int64_t{head} * half * 2 + i;
      const float low = wide(x[at]), high = wide(x[at + half]);
      const float c = cos[angle + i], s = sign * sin[angle + i];
      y[at] = narrow<T>(low * c - high * s);
      y[at + half] = narrow<T>(high * c + low * s);
    }
  }
}

template <class T>
void rotary_of(const void* x, const float* cos, const float* sin, float sign, void* y, int64_t rows, int64_t tokens,
               int64_t heads, int64_t half, int64_t angle_row, cudaStream_t stream) {
  launch(rotary_kernel<T>, blocks_for(rows * tokens), threads_for(heads * half, kMaxThreads), stream,
         static_cast<const T*>(x), cos, sin, sign, static_cast<T*>(y), rows * tokens, tokens, static_cast<int>(heads),
         static_cast<int>(half), angle_row);
}

}  // namespace

cudaError_t launch_rotary(ElementType element, const void* x, const float* cos, const float* sin, float sign, void* y,
                          int64_t rows, int64_t tokens, int64_t heads, int64_t half, int64_t angle_row,
                          cudaStream_t stream) {
  element == ElementType::kFloat
      ? rotary_of<float>(x, cos, sin, sign, y, rows, tokens, heads, half, angle_row, stream)
      : rotary_of<__nv_bfloat16>(x, cos, sin, sign, y, rows, tokens, heads, half, angle_row, stream);
  return cudaGetLastError();
}

}  // namespace tessera::kernels::cuda
