#include "tessera/kernels/cuda/elements.cuh"
#include "tessera/kernels/cuda/launchers.h"

namespace tessera::kernels::cuda {
namespace {

constexpr int kThreads = 256;

__device__ float sigmoid(float x) { return 1.0F / (1.0F + expf(-x)); }

struct Silu {
  float value, slope;
  __device__ explicit Silu(float x) {
    const float s = sigmoid(x);
    value = x * s;
    slope = value * (1.0F - s) + s;
  }
};

// x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3). This equals x times sigmoid(2 u).
struct Gelu {
  float value, slope;
  __device__ explicit Gelu(float x) {
    constexpr float kTwice = 1.5957691216F, kCube = 0.044715F;
    const float square = x * x, s = sigmoid(x * kTwice * (square * kCube + 1.0F));
    value = x * s;
    slope = value * (1.0F - s) * (square * (3.0F * kCube * kTwice) + kTwice) + s;
  }
};

template <class Activation, class T>
__device__ T gated(T gate, T up) {
  return narrow<T>(rounded<T>(Activation(wide(gate)).value) * wide(up));
}

template <class Activation, class T>
__device__ void gated_backward(T grad, T gate, T up, T& grad_gate, T& grad_up) {
  const Activation activation(wide(gate));
  const float g = wide(grad);
  grad_gate = narrow<T>(g * wide(up) * activation.slope);
  grad_up = narrow<T>(g * activation.value);
}

// Computes the elements in packs, then one by one the last elements, which do not fill a pack.
template <class Activation, int kPack, class T>
__global__ void gate_kernel(const T* gate, const T* up, T* y, int64_t count) {
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t pack = first; pack < count / kPack; pack += step) {
    const auto a = pack_at<kPack>(gate + pack * kPack), b = pack_at<kPack>(up + pack * kPack);
    Pack<T, kPack> result;
    for (int i = 0; i < kPack; ++i) result.at[i] = gated<Activation>(a.at[i], b.at[i]);
    store_pack<kPack>(y + pack * kPack, result);
  }
  for (int64_t i = count / kPack * kPack + first; i < count; i += step) y[i] = gated<Activation>(gate[i], up[i]);
}

template <class Activation, int kPack, class T>
__global__ void gate_backward_kernel(const T* grad, const T* gate, const T* up, T* grad_gate, T* grad_up,
                                     int64_t count) {
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t pack = first; pack < count / kPack; pack += step) {
    const auto g = pack_at<kPack>(grad + pack * kPack);
    const auto a = pack_at<kPack>(gate + pack * kPack), b = pack_at<kPack>(up + pack * kPack);
    Pack<T, kPack> to_gate, to_up;
    for (int i = 0; i < kPack; ++i) {
      gated_backward<Activation>(g.at[i], a.at[i], b.at[i], to_gate.at[i], to_up.at[i]);
    }
    store_pack<kPack>(grad_gate + pack * kPack, to_gate);
    store_pack<kPack>(grad_up + pack * kPack, to_up);
  }
  for (int64_t i = count / kPack * kPack + first; i < count; i += step) {
    gated_backward<Activation>(grad[i], gate[i], up[i], grad_gate[i], grad_up[i]);
  }
}

// Returns a number of thread blocks such that each thread computes at most one pack of `pack` elements. If blocks_for()
// limits the number of blocks, each thread of the kernels loops over several packs.
unsigned grid_of(int64_t count, int pack) { return blocks_for((count / pack + kThreads) / kThreads); }

template <class Activation, class T>
void run_gate(const T* gate, const T* up, T* y, int64_t count, cudaStream_t stream) {
  constexpr int kPack = kWidest<T>;
  // A Pack is read or written by one instruction, so its address must be aligned. A tensor that is a view of another
  // tensor may begin at an address that is not aligned.
  if (is_packable(gate, kPack) && is_packable(up, kPack) && is_packable(y, kPack)) {
    launch(gate_kernel<Activation, kPack, T>, grid_of(count, kPack), kThreads, stream, gate, up, y, count);
  } else {
    launch(gate_kernel<Activation, 1, T>, grid_of(count, 1), kThreads, stream, gate, up, y, count);
  }
}

template <class Activation, class T>
void run_gate_backward(const T* grad, const T* gate, const T* up, T* grad_gate, T* grad_up, int64_t count,
                       cudaStream_t stream) {
  constexpr int kPack = kWidest<T>;
  if (is_packable(grad, kPack) && is_packable(gate, kPack) && is_packable(up, kPack) && is_packable(grad_gate, kPack) &&
      is_packable(grad_up, kPack)) {
    launch(gate_backward_kernel<Activation, kPack, T>, grid_of(count, kPack), kThreads, stream, grad, gate, up,
           grad_gate, grad_up, count);
  } else {
    launch(gate_backward_kernel<Activation, 1, T>, grid_of(count, 1), kThreads, stream, grad, gate, up, grad_gate,
           grad_up, count);
  }
}

template <class T>
void gate_of(bool gelu, const void* gate, const void* up, void* y, int64_t count, cudaStream_t stream) {
  const auto* from = static_cast<const T*>(gate);
  const auto* factor = static_cast<const T*>(up);
  auto* to = static_cast<T*>(y);
  gelu ? run_gate<Gelu>(from, factor, to, count, stream) : run_gate<Silu>(from, factor, to, count, stream);
}

template <class T>
void gate_backward_of(bool gelu, const void* grad, const void* gate, const void* up, void* grad_gate, void* grad_up,
                      int64_t count, cudaStream_t stream) {
  const auto *g = static_cast<const T*>(grad), *from = static_cast<const T*>(gate);
  const auto* factor = static_cast<const T*>(up);
  auto *to_gate = static_cast<T*>(grad_gate), *to_up = static_cast<T*>(grad_up);
  gelu ? run_gate_backward<Gelu>(g, from, factor, to_gate, to_up, count, stream)
       : run_gate_backward<Silu>(g, from, factor, to_gate, to_up, count, stream);
}

}  // namespace

cudaError_t launch_gate(ElementType element, bool gelu, const void* gate, const void* up, void* y, int64_t count,
                        cudaStream_t stream) {
  element == ElementType::kFloat ? gate_of<float>(gelu, gate, up, y, count, stream)
                                 : gate_of<__nv_bfloat16>(gelu, gate, up, y, count, stream);
  return cudaGetLastError();
}

cudaError_t launch_gate_backward(ElementType element, bool gelu, const void* grad, const void* gate, const void* up,
                                 void* grad_gate, void* grad_up, int64_t count, cudaStream_t stream) {
  element == ElementType::kFloat
      ? gate_backward_of<float>(gelu, grad, gate, up, grad_gate, grad_up, count, stream)
      : gate_backward_of<__nv_bfloat16>(gelu, grad, gate, up, grad_gate, grad_up, count, stream);
  return cudaGetLastError();
}

}  // namespace tessera::kernels::cuda
