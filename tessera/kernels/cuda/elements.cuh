// Elements of tensors in CUDA kernels: read wide, in fp32, a few side by side, and rounded once when they are stored.
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

// x as T holds it.
template <class T>
__device__ float rounded(float x) {
  return wide(narrow<T>(x));
}

// kCount elements that are read and written in one go: their address is a multiple of their size.
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

// Elements of T in 16 bytes, which is the most that a thread reads at once.
template <class T>
constexpr int kWidest = 16 / static_cast<int>(sizeof(T));

// Whether rows of `width` elements from that address on can be read in packs of 16 bytes.
template <class T>
bool packs(const T* from, int64_t width) {
  return reinterpret_cast<uintptr_t>(from) % 16 == 0 && width % kWidest<T> == 0;
}

// The sum, or the largest, of the block's threads, for all of them, always in one order. `shared` has kWarp places; all
// threads take part, in whole warps.
__device__ inline float block_sum(float value, float* shared) {
  for (int other = kWarp / 2; other > 0; other /= 2) value += __shfl_xor_sync(kAllLanes, value, other);
  __syncthreads();  // whoever reads what it held before
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

// How many threads share a row of `steps` packs: whole warps, no more than they have to do.
inline int threads_for(int64_t steps, int most) {
  int threads = kWarp;
  while (threads < most && threads < steps) threads *= 2;
  return threads;
}

template <class T>
struct Same {  // lets no argument say what T is
  using Type = T;
};

// Starts `kernel`, which never needs more blocks than the grid has: its loop goes on where that ends.
template <class... Parameters>
void launch(void (*kernel)(Parameters...), unsigned blocks, int threads, cudaStream_t stream,
            typename Same<Parameters>::Type... arguments) {
#ifdef __CUDACC__
  kernel<<<blocks, static_cast<unsigned>(threads), 0, stream>>>(arguments...);
#else  // a stand-in for the compiler, as tests have one
  run_on_host(stream, blocks, static_cast<unsigned>(threads), [&] { kernel(arguments...); });
#endif
}

inline unsigned blocks_for(int64_t wanted) {
  constexpr int64_t kMost = 1 << 16;
  return static_cast<unsigned>(wanted < kMost ? wanted : kMost);
}

}  // namespace tessera::kernels::cuda
