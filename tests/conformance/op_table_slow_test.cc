// Placements and bytes of every operation against what PyTorch 2.13 does (op_table.txt, made by
// oracle/make_op_table.py): an operation that gathers where PyTorch does not fails, as does any difference that
// op_differences.txt does not list.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <iostream>
#include <map>

#include "tests/conformance/behaviour.h"
#include "tests/conformance/op_table.h"

namespace tessera::testing {
namespace {

TEST(OpTable, PlacementsAndBytesAreThoseOfPyTorchOrListed) {
  const OpTable table = read_op_table();
  ListedDifferences listed;
  std::map<std::string, int64_t> counts;
  std::map<std::string, std::vector<std::string>> wrong;
  for (const auto& one : behaviours_of(golden_samples())) {
    const auto known = table.find(one.op);
    ASSERT_NE(known, table.end()) << one.op << " is not in op_table.txt: make it again with oracle/make_op_table.py";
    const auto row = known->second.find(one.inputs);
    ASSERT_NE(row, known->second.end()) << one.op << ' ' << one.inputs << " is not in op_table.txt: make it again";
    const auto kind = difference(row->second, one.behaviour);
    ++counts[row->second.error ? "not done by PyTorch" : !kind ? "alike" : "different"];
    if (kind && !listed.allows(*kind, one.op, one.inputs)) {
      wrong[one.op].push_back(fmt::format("{} -> PyTorch {}, here {}", one.inputs, row->second.to_string(),
                                          one.behaviour.error ? one.error : one.behaviour.to_string()));
    }
  }
  for (const auto& [op, lines] : wrong) {
    ADD_FAILURE() << op << "\n  " << fmt::format("{}", fmt::join(lines, "\n  "));
  }
  EXPECT_THAT(listed.unused(), ::testing::IsEmpty()) << "op_differences.txt lists what does not differ";
  for (const auto& [what, count] : counts) {
    std::cout << fmt::format("{}: {} combinations\n", what, count);
  }
}

}  // namespace
}  // namespace tessera::testing
