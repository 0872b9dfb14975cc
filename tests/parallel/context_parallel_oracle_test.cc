// Tests that sequences are cut and partial attention results are merged as in PyTorch's context parallelism. PyTorch's
// ring attention itself runs on CUDA only, so it is not compared.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tessera/kernels/attention/context_layout.h"
#include "tessera/kernels/attention/partial_attention.h"
#include "tests/support/alone_on_device.h"
#include "tests/support/process.h"

namespace tessera::testing {
namespace {

nlohmann::json context_oracle() {
  const auto run = run_python("tests/parallel/oracle/context_parallel.py", {"3"});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  return nlohmann::json::parse(run.out);
}

at::Tensor floats(const nlohmann::json& numbers, std::vector<int64_t> sizes) {
  return here(at::tensor(numbers.get<std::vector<float>>()).view(sizes));
}

TEST(ContextParallelOracle, ShardsAndMergesAsPyTorch) {
  const auto oracle = context_oracle();
  EXPECT_GE(oracle["layouts"].size(), 15U);
  for (const auto& each : oracle["layouts"]) {
    const auto layout = kernels::ContextLayout::of_pytorch(each["tokens"], each["ranks"]);
    std::vector<at::Tensor> found;
    for (int64_t rank = 0; rank < layout.ranks(); ++rank) found.push_back(layout.positions(rank));
    EXPECT_TRUE(at::cat(found).equal(at::tensor(each["order"].get<std::vector<int64_t>>())))
        << each["tokens"] << " tokens over " << each["ranks"];
  }
  EXPECT_EQ(oracle["merges"].size(), 2U);
  for (const auto& each : oracle["merges"]) {
    const int64_t tokens = each["tokens"];
    kernels::PartialAttentionMerger sums(here(at::empty({1, 1, tokens, 3})));
    for (const auto& part : each["parts"]) {
      const int64_t first = part["second_half"].get<bool>() ? tokens / 2 : 0, count = tokens - first;
      sums.add({floats(part["out"], {1, 1, count, 3}), floats(part["log_sums"], {1, 1, count})}, 0, first);
    }
    const auto joined = sums.merged();
    EXPECT_TRUE(at::allclose(joined.out, floats(each["out"], {1, 1, tokens, 3}), 1e-6, 1e-6));
    EXPECT_TRUE(at::allclose(joined.log_sums, floats(each["log_sums"], {1, 1, tokens}), 1e-6, 1e-6));
  }
}

}  // namespace
}  // namespace tessera::testing
