// Tests placements and bytes of every operation against PyTorch 2.13 (op_table.txt, written by
// oracle/make_op_table.py). An operation that gathers where PyTorch does not gather fails, as does every difference
// that op_differences.txt does not list. Where PyTorch's behaviour is no reference, op_ours.txt has the expected
// behaviour.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <map>
#include <optional>

#include "tests/conformance/behaviour.h"
#include "tests/conformance/op_table.h"

namespace tessera::testing {
namespace {

std::optional<Behaviour> find_row(const std::map<std::string, Behaviour>& rows, const std::string& inputs) {
  const auto row = rows.find(inputs);
  return row == rows.end() ? std::nullopt : std::optional(row->second);
}

TEST(OpTable, PlacementsAndBytesMatchPyTorchOrAListedDifference) {
  const OpTable table = read_op_table("op_table.txt");
  OpTable ours = read_op_table("op_ours.txt");  // the entries that no operation has met
  ListedDifferences differences;
  std::map<std::string, int64_t> counts;
  std::map<std::string, std::vector<std::string>> wrong;
  for (const auto& one : behaviours_of(golden_samples())) {
    const auto known = table.find(one.op);
    const auto row = known == table.end() ? std::nullopt : find_row(known->second, one.inputs);
    if (!row) {
      wrong[one.op].push_back(one.inputs + ": not in op_table.txt, make it again with oracle/make_op_table.py");
      continue;
    }
    if (one.behaviour.error && !one.may_refuse) wrong[one.op].push_back(one.inputs + " is no refusal: " + one.error);
    if (is_ours(*row, one.behaviour)) {
      const auto said = find_row(ours[one.op], one.inputs);
      if (!said || said->to_string() != one.behaviour.to_string()) {
        wrong[one.op].push_back(fmt::format("{} -> {}, op_ours.txt says {} (PyTorch {})", one.inputs,
                                            one.behaviour.error ? one.error : one.behaviour.to_string(),
                                            said ? said->to_string() : "nothing", row->to_string()));
      }
      ours[one.op].erase(one.inputs);
      ++counts[row->error   ? "not done by PyTorch"
               : row->wrong ? "done wrong by PyTorch"
                            : "with fewer bytes, elsewhere"];
      continue;
    }
    const auto kind = difference(*row, one.behaviour);
    const bool fewer = kind == DifferenceKind::kFewer;
    const bool listed = kind && !fewer && differences.allows(*kind, one.op, one.inputs);
    ++counts[!kind ? "alike" : fewer ? "with fewer bytes" : listed ? "listed as different" : "different"];
    if (kind && !fewer && !listed) {
      wrong[one.op].push_back(fmt::format("{} -> PyTorch {}, here {}", one.inputs, row->to_string(),
                                          one.behaviour.error ? one.error : one.behaviour.to_string()));
    }
  }
  for (const auto& [op, lines] : wrong) ADD_FAILURE() << op << "\n  " << fmt::format("{}", fmt::join(lines, "\n  "));
  if (std::getenv("TESSERA_OP") == nullptr) {
    EXPECT_THAT(differences.miscounted(), ::testing::IsEmpty()) << "op_differences.txt says of how many combinations";
    for (const auto& [op, rows] : ours) {
      EXPECT_TRUE(rows.empty()) << op << ": op_ours.txt lists what is not so: " << rows.begin()->first;
    }
  }
  for (const auto& [what, count] : counts) std::cout << fmt::format("{}: {} combinations\n", what, count);
}

}  // namespace
}  // namespace tessera::testing
