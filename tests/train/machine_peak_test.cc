// Tests of the measured peak of matrix products, and of the FLOPs per token of a model.
#include "tessera/train/profile/machine_peak.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <chrono>

#include "tessera/models/config/config.h"

namespace tessera::train {
namespace {

TEST(MachinePeak, IsTheRateOfTheFastestCall) {
  double clock = 100;
  std::vector<double> durations = {2, 0.5, 1, 4, 0.25};  // the last call begins after 3.5 s
  size_t calls = 0;
  EXPECT_DOUBLE_EQ(best_rate(
                       10, 3.5, [&] { clock += durations.at(calls++); }, [&] { return clock; }),
                   20);
  EXPECT_EQ(calls, 3u);
}

// Compares with another measurement of a product on this machine. The factor of 30 is generous, but a wrong unit is a
// larger error.
TEST(MachinePeak, IsMeasuredOnceAndMatchesAMatmul) {
  const double peak = matmul_peak(c10::kFloat);
  EXPECT_EQ(matmul_peak(c10::kFloat), peak);
  const auto a = at::ones({1024, 1024}), b = at::ones({1024, 1024});
  double shortest = 1e9;
  for (int i = 0; i < 5; ++i) {
    const auto start = std::chrono::steady_clock::now();
    at::mm(a, b);
    shortest = std::min(shortest, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  const double ratio = peak / (2.0 * 1024 * 1024 * 1024 / shortest);
  EXPECT_GT(ratio, 1.0 / 30);
  EXPECT_LT(ratio, 30);
}

TEST(MachinePeak, FlopsPerTokenCountWeightsAndAttention) {
  ModelConfig config;  // the small Llama of the benchmarks
  config.vocab_size = 8192;
  config.hidden_size = 256;
  config.intermediate_size = 704;
  config.num_hidden_layers = 4;
  config.num_attention_heads = 8;
  config.num_key_value_heads = 4;
  config.head_dim = 32;
  const double weights = 4.0 * (256 * 256 * 2 + 256 * 128 * 2 + 3 * 256 * 704) + 256.0 * 8192;
  EXPECT_DOUBLE_EQ(flops_per_token(config, 256), 6 * weights + 12.0 * 4 * 8 * 32 * 128);
  config.sliding_window = 16;
  EXPECT_DOUBLE_EQ(flops_per_token(config, 256), 6 * weights + 12.0 * 4 * 8 * 32 * 16);
}

}  // namespace
}  // namespace tessera::train
