// Tests that gradients are assigned to buckets as PyTorch's DDP assigns them, with random tensors.
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "tessera/parallel/ddp/bucket_plan.h"
#include "tests/support/process.h"

namespace tessera {
namespace {

TEST(BucketPlan, AssignsRandomTensorsAsPyTorchDoes) {
  const auto run = testing::run_python("tests/parallel/oracle/bucket_assignment.py", {"5", "200"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const std::map<std::string, c10::ScalarType> dtypes = {
      {"float32", at::kFloat}, {"bfloat16", at::kBFloat16}, {"float64", at::kDouble}};
  const auto cases = nlohmann::json::parse(run.out);
  ASSERT_EQ(cases.size(), 200u);
  for (const auto& each : cases) {
    std::vector<BucketItem> items;
    for (const auto& item : each["items"]) items.push_back({item[0], dtypes.at(item[1])});
    EXPECT_EQ(assign_buckets(items, each["first_limit"], each["limit"]),
              each["buckets"].get<std::vector<std::vector<size_t>>>())
        << each.dump();
  }
}

}  // namespace
}  // namespace tessera
