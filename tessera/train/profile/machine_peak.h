// The measured peak of matrix products on this machine, and the FLOPs of a model: together they give the share of the
// peak that a step achieved (MFU).
//
//   const double peak = matmul_peak(at::kFloat);                      // FLOP/s of this process with its threads
//   double share = flops_per_token(config, 512) * tokens / seconds / (peak * ranks);
//
// Thread-safe.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>

namespace tessera {
struct ModelConfig;
}

namespace tessera::train {

// FLOP/s of a 1024 x 1024 x 1024 product of tessera::kernels::linear at the current thread count: the fastest call in
// about 0.2 s. Measured once per process for each dtype (kFloat, kBFloat16) and thread count.
double matmul_peak(c10::ScalarType dtype);

// Calls `call` repeatedly for `seconds`, at least once, and returns `work` divided by the time of the fastest call.
// `now` returns the time in seconds.
double best_rate(double work, double seconds, const std::function<void()>& call, const std::function<double()>& now);

// FLOPs of one training token, forward and backward. Each weight that the token is multiplied with counts 6; the
// embedding lookup does not count, the head counts even if it is tied. Attention counts 12 x layers x heads x head size
// x attended tokens. Attended tokens are half the sequence under the causal mask, or at most the window. PaLM's
// appendix B counts the whole sequence instead and is higher.
double flops_per_token(const ModelConfig& config, int64_t sequence_length);

}  // namespace tessera::train
