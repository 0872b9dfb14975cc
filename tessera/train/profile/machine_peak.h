// What this machine's matrix products reach, and what a model asks of them: the share of the peak that a step used.
//
//   const double peak = matmul_peak(at::kFloat);                      // FLOP/s of this process, its threads
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

// FLOP/s of a 1024 x 1024 x 1024 product as tessera::kernels::linear does it, the best of about 0.2 s, at the current
// thread count; measured once for each dtype (kFloat, kBFloat16) and thread count of the process.
double matmul_peak(c10::ScalarType dtype);

// `work` over the time of the fastest of the calls that fit into `seconds`, at least one. `now` tells seconds.
double best_rate(double work, double seconds, const std::function<void()>& call, const std::function<double()>& now);

// FLOPs of one training token, forward and backward: 6 for each weight it is multiplied with (the embedding's lookup
// left out, the head counted whether tied or not), and 12 x layers x heads x head size x attended tokens, which are
// half the sequence under the causal mask, or the window. PaLM's appendix B, which counts the whole sequence, is more.
double flops_per_token(const ModelConfig& config, int64_t sequence_length);

}  // namespace tessera::train
