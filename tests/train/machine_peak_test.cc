#include "tessera/train/machine_peak.h"

#include <gtest/gtest.h>

#include "tessera/models/config.h"

namespace tessera::train {
namespace {

TEST(MachinePeak, IsMeasuredOnceAndIsAPlausibleSpeed) {
  const double peak = matmul_peak(c10::kFloat);
  EXPECT_GT(peak, 1e8);
  EXPECT_LT(peak, 1e15);
  EXPECT_EQ(matmul_peak(c10::kFloat), peak);
}

TEST(MachinePeak, FlopsOfATokenAreThoseOfItsWeightsAndAttention) {
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
