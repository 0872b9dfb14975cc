// Tests that the tables of every schedule, computed and lowered, are equal to the tables of
// torch.distributed.pipelining.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/parallel/pipeline/check_schedule.h"
#include "tessera/parallel/pipeline/lowering.h"
#include "tests/support/process.h"

namespace tessera::pipeline {
namespace {

using nlohmann::json;

// In torch, the order in which several stages are freed is the order of a Python set. Consecutive frees are therefore
// sorted.
std::vector<Action> with_sorted_reshards(std::vector<Action> row) {
  const auto frees = [](const Action& action) { return action.kind == ActionKind::kReshard; };
  for (auto first = row.begin(); first != row.end();) {
    first = std::find_if(first, row.end(), frees);
    const auto end = std::find_if_not(first, row.end(), frees);
    std::sort(first, end, [](const Action& a, const Action& b) { return a.stage < b.stage; });
    first = end;
  }
  return row;
}

std::vector<Action> actions_of(const ActionRow& row) {
  std::vector<Action> out;
  for (const auto& cell : row) {
    if (cell) out.push_back(*cell);
  }
  return out;
}

ScheduleTable table_of_lines(const json& lines) {
  std::string csv;
  for (const auto& line : lines) csv += line.get<std::string>() + "\n";
  return ScheduleTable::from_csv(csv, "oracle");
}

// Compares our table with torch's table of GPipe or 1F1B, except for three differences: our bubbles, which torch's
// tables do not have; REDUCE_GRAD, which is only for lowering; and the last rank's forwards of 1F1B, which torch
// numbers from 1 although torch's runtime begins with 0.
void expect_single(const Schedule& ours, const ScheduleTable& theirs) {
  for (size_t rank = 0; rank < theirs.ranks.size(); ++rank) {
    auto wanted = actions_of(theirs.ranks[rank]);
    std::erase_if(wanted, [](const Action& action) { return action.kind == ActionKind::kReduceGrad; });
    const bool shifted = ours.name == "1F1B" && rank + 1 == theirs.ranks.size();
    for (auto& action : wanted) action.micro_batch -= shifted && action.kind == ActionKind::kForward;
    EXPECT_EQ(actions_of(ours.table.ranks[rank]), wanted) << ours.name << " rank " << rank;
  }
}

void expect_multi(const Schedule& ours, const json& theirs) {
  EXPECT_EQ(ours.table, table_of_lines(theirs["table"]));
  if (!theirs.contains("lowered")) return;
  const auto lowered = lower(ours), wanted = table_of_lines(theirs["lowered"]);
  ASSERT_EQ(lowered.ranks.size(), wanted.ranks.size());
  const auto merged = table_of_lines(theirs["merged"]);
  for (size_t rank = 0; rank < wanted.ranks.size(); ++rank) {
    EXPECT_EQ(with_sorted_reshards(actions_of(lowered.ranks[rank])),
              with_sorted_reshards(actions_of(wanted.ranks[rank])));
    EXPECT_EQ(merge_bw(ours.table.ranks[rank]), actions_of(merged.ranks[rank]));
  }
  EXPECT_NO_THROW(check_lowered(lowered, ours.rank_of, ours.micro_batches));
}

TEST(PipelineSchedules, TablesEqualPyTorch) {
  const auto run = testing::run_python("tests/parallel/oracle/pipeline_schedules.py", {});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const auto cases = json::parse(run.out);
  ASSERT_GT(cases.size(), 170u);
  size_t refused = 0;
  for (const auto& each : cases) {
    const auto name = each["name"].get<std::string>();
    const ScheduleSize size{each["ranks"], each["stages_per_rank"], each["micro_batches"]};
    SCOPED_TRACE(fmt::format("{}: {} ranks, {} stages each, {} micro-batches", name, size.ranks, size.stages_per_rank,
                             size.micro_batches));
    if (each.contains("error")) {
      ++refused;
      try {
        make_schedule(name, size);
        ADD_FAILURE() << "PyTorch refuses: " << each["error"];
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kConfig);
        auto wanted = each["error"].get<std::string>();
        // torch's DualPipeV names itself in this message.
        if (name == "DualPipeV" && wanted.starts_with("ZBV")) wanted.replace(0, 3, name);
        EXPECT_NE(std::string(error.what()).find(wanted), std::string::npos) << error.what();
      }
      continue;
    }
    const auto ours = make_schedule(name, size);
    EXPECT_EQ(check_schedule(ours.table, {size.ranks, ours.stages(), size.micro_batches}), ours.rank_of);
    const bool single = schedule_traits(name).one_stage_per_rank;
    single ? expect_single(ours, table_of_lines(each["table"])) : expect_multi(ours, each);
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(refused, 10u);
}

}  // namespace
}  // namespace tessera::pipeline
