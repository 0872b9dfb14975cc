// Helpers of the CUDA kernels: elements are read several at a time, computed in fp32, and rounded once when stored.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>

namespace tessera::kernels::cuda {

constexpr unsigned kAllLanes = 0xffffffffU;
constexpr int kWarp = 32;

__device__ inline float wide(float x) { return x; }
__device__ inline float wide(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ T narrow(float x);
template <>
__device__ inline float narrow<float>(float x) {
  return x;
}
template <>
__device__ inline __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// x rounded to T.
template <class T>
__device__ float rounded(float x) {
  return wide(narrow<T>(x));
}

// kCount elements that one instruction reads or writes. Their address is a multiple of their size.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T at[kCount];
};

template <int kCount, class T>
__device__ Pack<T, kCount> pack_at(const T* from) {
  return *reinterpret_cast<const Pack<T, kCount>*>(from);
}

template <int kCount, class T>
__device__ void store_pack(T* to, const Pack<T, kCount>& pack) {
  *reinterpret_cast<Pack<T, kCount>*>(to) = pack;
}

// Elements of T in 16 bytes, the largest access of a thread.
template <class T>
constexpr int kWidest = 16 / static_cast<int>(sizeof(T));

// Returns whether rows of `width` elements that start at `from` can be read in packs of 16 bytes.
template <class T>
bool is_packable(const T* from, int64_t width) {
  return reinterpret_cast<uintptr_t>(from) % 16 == 0 && width % kWidest<T> == 0;
}

// The sum, or the maximum, over the threads of a block, returned to all of them. The order is fixed. `shared` has kWarp
// elements. All threads must call; the block consists of whole warps.
__device__ inline float block_sum(float value, float* shared) {
  for (int other = kWarp / 2; other > 0; other /= 2) value += __shfl_xor_sync(kAllLanes, value, other);
  __syncthreads();  // earlier readers of `shared` are done
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = 0;
  for (unsigned warp = 0; warp < blockDim.x / kWarp; ++warp) value += shared[warp];
  return value;
}

__device__ inline float block_max(float value, float* shared) {
  for (int other = kWarp / 2; other > 0; other /= 2) value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, other));
  __syncthreads();
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = shared[0];
  for (unsigned warp = 1; warp < blockDim.x / kWarp; ++warp) value = fmaxf(value, shared[warp]);
  return value;
}

// Returns the number of threads for a row that takes `steps` loop steps; in each step a thread computes one Pack or one
// element. The result is the smallest power of two that is at least `steps`, but at least one warp and at most
// `max_threads`, which is a power of two.
inline int threads_for(int64_t steps, int max_threads) {
  int threads = kWarp;
  while (threads < max_threads && threads < steps) threads *= 2;
  return threads;
}

template <class T>
struct TypeIdentity {  // keeps an argument out of template deduction
  using Type = T;
};

// Launches `kernel`. The grid may be smaller than the work: kernels loop over it in grid strides.
template <class... Parameters>
void launch(void (*kernel)(Parameters...), unsigned blocks, int threads, cudaStream_t stream,
            typename TypeIdentity<Parameters>::Type... arguments) {
#ifdef __CUDACC__
  kernel<<<blocks, static_cast<unsigned>(threads), 0, stream>>>(arguments...);
#else  // tests replace the CUDA compiler
  run_on_host(stream, blocks, static_cast<unsigned>(threads), [&] { kernel(arguments...); });
#endif
}

inline unsigned blocks_for(int64_t blocks) {
  constexpr int64_t kMaxBlocks = 1 << 16;
  return static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks);
}

}  // namespace tessera::kernels::cuda
