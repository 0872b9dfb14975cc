#include "tessera/train/profile/machine_peak.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <map>
#include <mutex>

#include "tessera/kernels/linear/linear.h"
#include "tessera/models/config/config.h"

namespace tessera::train {
namespace {

double measure_peak(c10::ScalarType dtype) {
  constexpr int64_t kSize = 1024;
  constexpr double kFlops = 2.0 * kSize * kSize * kSize;
  const at::NoGradGuard no_grad;
  const at::Tensor x = at::ones({kSize, kSize}, dtype);
  const at::Tensor weight = at::ones({kSize, kSize}, dtype);
  tessera::kernels::linear(x, weight);  // the first call chooses kernels and touches memory, and is not measured
  const auto now = [] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  };
  return best_rate(
      kFlops, 0.2, [&] { tessera::kernels::linear(x, weight); }, now);
}

}  // namespace

double matmul_peak(c10::ScalarType dtype) {
  // The lock is held while measuring, so that two threads do not measure at the same time and disturb each other.
  static std::mutex mutex;
  static std::map<std::pair<c10::ScalarType, int>, double> peaks;
  const std::lock_guard lock(mutex);
  const auto [entry, fresh] = peaks.try_emplace({dtype, at::get_num_threads()}, 0.0);
  if (fresh) entry->second = measure_peak(dtype);
  return entry->second;
}

// The fastest call counts: other processes can only make a call slower.
double best_rate(double work, double seconds, const std::function<void()>& call, const std::function<double()>& now) {
  const double start = now();
  double shortest = std::numeric_limits<double>::infinity();
  for (double begin = start; begin - start < seconds;) {
    call();
    const double end = now();
    shortest = std::min(shortest, end - begin);
    begin = end;
  }
  return work / std::max(shortest, 1e-9);
}

double flops_per_token(const ModelConfig& config, int64_t sequence_length) {
  const auto number = [](int64_t value) { return static_cast<double>(value); };
  const double queries = number(config.num_attention_heads) * number(config.head_dim);
  const double keys = number(config.num_key_value_heads) * number(config.head_dim);
  const double hidden = number(config.hidden_size);
  const double attention_weights = hidden * (2 * queries + 2 * keys);  // q and output, k and v
  double weights = hidden * number(config.vocab_size);
  double attended = 0;  // tokens that a token attends to, summed over the layers
  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    const auto& experts = config.experts;  // a token is computed by `chosen` experts of a layer
    const int64_t inner =
        config.has_experts(layer) ? experts.num_experts_per_tok * experts.intermediate_size : config.intermediate_size;
    weights += attention_weights + 3 * hidden * number(inner);  // gate, up and down projections
    const double window = config.sliding_window_of_layer(layer) > 0 ? number(config.sliding_window_of_layer(layer))
                                                                    : number(sequence_length);
    attended += std::min(number(sequence_length) / 2, window);
  }
  return 6 * weights + 12 * queries * attended;
}

}  // namespace tessera::train
