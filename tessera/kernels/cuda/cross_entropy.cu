#include <cfloat>

#include "tessera/kernels/cuda/elements.cuh"
#include "tessera/kernels/cuda/launchers.h"

namespace tessera::kernels::cuda {
namespace {

constexpr int kMaxThreads = 1024;

template <int kPack>
__device__ void fill_row(float* row, float value, int64_t classes) {
  Pack<float, kPack> same;
  for (int i = 0; i < kPack; ++i) same.at[i] = value;
  for (int64_t at = int64_t{threadIdx.x} * kPack; at < classes; at += int64_t{blockDim.x} * kPack) {
    store_pack<kPack>(row + at, same);
  }
}

// The online softmax of a row: the largest logit so far, and the sum of exp(logit - largest). A logit that is NaN or
// +infinity makes the sum NaN.
struct OnlineSoftmax {
  float maximum = -FLT_MAX, sum = 0;

  // Starting from -FLT_MAX instead of -infinity keeps `maximum - x` defined for logits of -infinity.
  __device__ void add(float x) {
    if (x > maximum) {
      sum = sum * expf(maximum - x) + 1.0F;
      maximum = x;
    } else {
      sum += expf(x - maximum);
    }
  }
  // Combines `maximum` and `sum` of all threads of the thread block.
  __device__ void reduce_block(float* shared) {
    const float largest = block_max(maximum, shared);
    sum = block_sum(sum * expf(maximum - largest), shared);
    maximum = largest;
    if (maximum > FLT_MAX) sum = nanf("");
  }
};

// Each thread block computes one row at a time. The row is read once for maximum and sum, and once more to write
// softmax - onehot.
template <int kPack>
__global__ void cross_entropy_kernel(float* logits, const int64_t* labels, int64_t ignored_label, bool wants_gradient,
                                     float* losses, int64_t rows, int64_t classes) {
  __shared__ float shared[kWarp];
  for (int64_t number = blockIdx.x; number < rows; number += gridDim.x) {
    float* row = logits + number * classes;
    const int64_t label = labels[number];
    if (label < 0 || label >= classes) {  // the same for the whole block
      const float value = label == ignored_label ? 0.0F : nanf("");
      if (threadIdx.x == 0) losses[number] = value;
      if (wants_gradient) fill_row<kPack>(row, value, classes);
      continue;
    }
    const float own = row[label];
    OnlineSoftmax all;
    for (int64_t at = int64_t{threadIdx.x} * kPack; at < classes; at += int64_t{blockDim.x} * kPack) {
      const auto pack = pack_at<kPack>(row + at);
      for (int i = 0; i < kPack; ++i) all.add(pack.at[i]);
    }
    all.reduce_block(shared);  // all threads have read row[label] before the row is overwritten below
    if (threadIdx.x == 0) losses[number] = logf(all.sum) - (own - all.maximum);
    if (!wants_gradient) continue;
    const float factor = 1.0F / all.sum;
    for (int64_t at = int64_t{threadIdx.x} * kPack; at < classes; at += int64_t{blockDim.x} * kPack) {
      auto pack = pack_at<kPack>(row + at);
      for (int i = 0; i < kPack; ++i) {
        pack.at[i] = expf(pack.at[i] - all.maximum) * factor - (at + i == label ? 1.0F : 0.0F);
      }
      store_pack<kPack>(row + at, pack);
    }
  }
}

template <int kPack>
void run(float* logits, const int64_t* labels, int64_t ignored_label, bool wants_gradient, float* losses, int64_t rows,
         int64_t classes, cudaStream_t stream) {
  launch(cross_entropy_kernel<kPack>, blocks_for(rows), threads_for(classes / kPack, kMaxThreads), stream, logits,
         labels, ignored_label, wants_gradient, losses, rows, classes);
}

}  // namespace

cudaError_t launch_cross_entropy(float* logits, const int64_t* labels, int64_t ignored_label, bool wants_gradient,
                                 float* losses, int64_t rows, int64_t classes, cudaStream_t stream) {
  is_packable(logits, classes)
      ? run<kWidest<float>>(logits, labels, ignored_label, wants_gradient, losses, rows, classes, stream)
      : run<1>(logits, labels, ignored_label, wants_gradient, losses, rows, classes, stream);
  return cudaGetLastError();
}

}  // namespace tessera::kernels::cuda
