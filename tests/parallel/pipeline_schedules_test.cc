// Tests of pipeline schedules as data: order, text form, lowering, refused schedules and cost.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sstream>

#include "tessera/base/error.h"
#include "tessera/parallel/pipeline/check_schedule.h"
#include "tessera/parallel/pipeline/lowering.h"
#include "tessera/parallel/pipeline/stages.h"

namespace tessera::pipeline {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// "0F0 . (0F3;3B1) 2B0": '.' is a bubble, (a;b) an overlap.
ActionRow row_of(const std::string& text) {
  ActionRow row;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    row.push_back(word == "." ? std::nullopt : Action::parse(word.front() == '(' ? word + "OVERLAP_F_B" : word));
  }
  return row;
}

ActionRow without_last_bubbles(ActionRow row) {
  while (!row.empty() && !row.back()) row.pop_back();
  return row;
}

std::string error_of(const std::function<void()>& call, ErrorKind kind) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    return error.what();
  }
  return "no error";
}

struct Golden {
  std::string name;
  ScheduleSize size;
  std::vector<std::string> rows;
};

const std::vector<Golden> kGolden = {
    {"GPipe", {2, 1, 2}, {"0F0 0F1 . . 0B0 0B1", ". 1F0 1F1 1B0 1B1"}},
    {"1F1B", {2, 1, 3}, {"0F0 0F1 . 0B0 0F2 0B1 . 0B2", ". 1F0 1B0 1F1 1B1 1F2 1B2"}},
    {"LoopedBFS", {2, 2, 2}, {"0F0 0F1 2F0 2F1 . . 2B1 2B0 0B1 0B0", ". 1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0"}},
    {"Interleaved1F1B",
     {2, 2, 4},
     {"0F0 0F1 2F0 2F1 . . 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 . 2B2 . 2B3 . 0B2 . 0B3",
      ". 1F0 1F1 . 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 . 1B2 . 1B3"}},
    {"Interleaved1F1B",
     {2, 2, 3},
     {"0F0 0F1 0F2 2F0 2F1 . 2F2 2B0 . 2B1 . 2B2 . 0B0 . 0B1 . 0B2",
      ". 1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 . 1B0 . 1B1 . 1B2"}},
    {"InterleavedZeroBubble",
     {2, 2, 4},
     {"0F0 0F1 2F0 . 2F1 2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3",
      ". 1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3"}},
    {"ZBVZeroBubble",
     {2, 2, 4},
     {"0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3",
      ". 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3"}},
    {"DualPipeV",
     {2, 2, 4},
     {"0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1) (3F2;0B0) 3B2 (3F3;0B1) 3B3 0I2 0W2 0I3 0W3",
      "1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0) (1F3;2B1) (2F3;1B1) 2B2 1B2 2I3 1I3 2W3 1W3"}}};

TEST(PipelineSchedule, TablesEqualTheGoldenTables) {
  for (const auto& [name, size, rows] : kGolden) {
    const auto schedule = make_schedule(name, size);
    ASSERT_EQ(schedule.table.ranks.size(), rows.size());
    for (size_t rank = 0; rank < rows.size(); ++rank) {
      // Bubbles at the end of a row are not counted.
      const auto made = without_last_bubbles(schedule.table.ranks[rank]);
      EXPECT_EQ(made, row_of(rows[rank])) << name << " rank " << rank << "\n" << schedule.table.to_text();
    }
    EXPECT_EQ(check_schedule(schedule.table, {size.ranks, schedule.stages(), size.micro_batches}), schedule.rank_of);
  }
}

TEST(PipelineSchedule, LoweredTablesEqualTheGoldenTables) {
  const auto lowered = lower(make_schedule("interleaved1f1b", {2, 2, 2}));
  EXPECT_EQ(
      lowered.ranks[0],
      row_of("0UNSHARD 2UNSHARD 0F0 0SEND_F0 2RECV_F0 0F1 0SEND_F1 2RECV_F1 2F0 2SEND_F0 2F1 2SEND_F1 2RECV_B0 2B0 "
             "2SEND_B0 2RECV_B1 2B1 2SEND_B1 2REDUCE_GRAD 2RESHARD 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE_GRAD "
             "0RESHARD"));
  EXPECT_EQ(lowered.ranks[1],
            row_of("1UNSHARD 3UNSHARD 1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 3RECV_F0 3F0 3RECV_F1 3B0 3SEND_B0 "
                   "1RECV_B0 3F1 3B1 3SEND_B1 1RECV_B1 3REDUCE_GRAD 3RESHARD 1B0 1SEND_B0 1B1 1SEND_B1 1REDUCE_GRAD "
                   "1RESHARD"));
  EXPECT_NO_THROW(check_lowered(lowered, {0, 1, 0, 1}, 2));
}

TEST(PipelineSchedule, NeighbouringStagesOnOneRankSendNothing) {
  const auto lowered = lower(make_schedule("ZBVZeroBubble", {1, 2, 3}));
  for (const auto& cell : lowered.ranks[0]) EXPECT_THAT(cell->text(), ::testing::Not(HasSubstr("SEND")));
  EXPECT_EQ(make_schedule("dualpipev", {3, 2, 6}).rank_of, (std::vector<int>{0, 1, 2, 2, 1, 0}));
}

TEST(PipelineSchedule, ForwardOnlyTableCompletesForEveryStageAssignment) {
  for (const char* name : {"GPipe", "LoopedBFS", "ZBVZeroBubble"}) {
    const auto schedule = make_schedule(name, {3, std::string(name) == "GPipe" ? 1 : 2, 5});
    const auto lowered = lower_forward(schedule.rank_of, schedule.ranks(), schedule.micro_batches);
    EXPECT_NO_THROW(check_lowered(lowered, schedule.rank_of, 5));
    size_t forwards = 0;
    for (const auto& row : lowered.ranks) {
      for (const auto& cell : row) forwards += cell->kind == ActionKind::kForward;
    }
    EXPECT_EQ(forwards, static_cast<size_t>(schedule.stages()) * 5);
  }
}

TEST(PipelineAction, TextRoundTrips) {
  for (const char* text : {"1F0", "2I1", "0W3", "0B3", "1UNSHARD", "3RESHARD", "0REDUCE_GRAD", "2SEND_B2", "1RECV_F1",
                           "12RECV_B345", "(0F3;3B1)OVERLAP_F_B"}) {
    const auto action = Action::parse(std::string("  ") + text + " ");
    ASSERT_TRUE(action) << text;
    EXPECT_EQ(action->text(), text);
  }
  EXPECT_FALSE(Action::parse(" "));
  for (const char* text : {"F0", "0X1", "0F", "1UNSHARD3", "0F1x", "-1F0", "0F-1", "99999999999F0", "()OVERLAP_F_B",
                           "0", "((0F0)OVERLAP_F_B)OVERLAP_F_B", "0OVERLAP_F_B", "0F1 0F2"}) {
    EXPECT_THAT(error_of([&] { Action::parse(text); }, ErrorKind::kFormat), HasSubstr("Invalid")) << text;
  }
  EXPECT_THAT(
      error_of([] { Action::parse("0G7"); }, ErrorKind::kFormat),
      HasSubstr("Invalid action string: '0G7', should be formatted as [stage][action type][(microbatch)] e.g. 2F0"));
  EXPECT_THAT(error_of([] { Action::parse("(0F0;1B0)B"); }, ErrorKind::kFormat),
              HasSubstr("Invalid computation type 'B'"));
}

TEST(PipelineTable, CsvRoundTripsWithBubbles) {
  for (const auto& [name, size, rows] : kGolden) {
    const auto table = make_schedule(name, size).table;
    EXPECT_EQ(ScheduleTable::from_csv(table.to_csv(), "x"), table);
  }
  const auto read = ScheduleTable::from_csv("0F0,,0B0\r\n,1F0,\"1B0\"\r\n", "x");
  EXPECT_EQ(read.to_csv(), "0F0,,0B0\n,1F0,1B0\n");
  EXPECT_EQ(schedule_of_table(ScheduleTable::from_csv("0F0,,,0B0\n,1F0,1B0\n", "x"), "x").rank_of, (std::vector{0, 1}));
  EXPECT_THAT(error_of([] { ScheduleTable::from_csv("0F0\n1F0,oh", "s.csv"); }, ErrorKind::kFormat),
              HasSubstr("s.csv: line 2, cell 2"));
  EXPECT_THAT(error_of([] { ScheduleTable::from_csv("", "s.csv"); }, ErrorKind::kFormat), HasSubstr("s.csv"));
}

TEST(PipelineTable, PrintsStepsDownAndRanksAcross) {
  const auto table = make_schedule("GPipe", {2, 1, 1}).table;
  EXPECT_EQ(table.to_text(1),
            "        Rank 0 Rank 1 \n"
            "Step 0: 0F0           \n"
            "Step 1:        1F0    <-- ERROR HERE\n"
            "Step 2:        1B0    \n"
            "Step 3: 0B0           \n");
}

TEST(PipelineCheck, InvalidSchedulesAreRefused) {
  const auto refused = [](const std::vector<std::string>& rows, int stages, int micro_batches) {
    ScheduleTable table;
    for (const auto& row : rows) table.ranks.push_back(row_of(row));
    const ScheduleExtent extent{static_cast<int>(rows.size()), stages, micro_batches};
    return error_of([&] { check_schedule(table, extent); }, ErrorKind::kConfig);
  };
  EXPECT_THAT(
      refused({"0B0 0F0"}, 1, 1),
      HasSubstr("Rank 0, step 0: Running Full Backward for stage 0, microbatch 0 without first running Forward"));
  EXPECT_THAT(refused({"0F0 0W0 0I0"}, 1, 1), HasSubstr("without first running Backward Input"));
  EXPECT_THAT(refused({"0F0 0B0", "0F1 0B1"}, 1, 2), HasSubstr("Stage 0 is assigned to both rank 1 and rank 0"));
  EXPECT_THAT(refused({"0F0 0B0"}, 1, 2), HasSubstr("Got 1 F microbatches for stage 0, expected 2"));
  EXPECT_THAT(refused({"0F0 0F1 0B0"}, 1, 2), HasSubstr("expected 2 total backwards, but got B=1, I=0, W=0"));
  EXPECT_THAT(refused({"0F0 0I0"}, 1, 1), HasSubstr("I and W must have equal counts, but got I=1, W=0"));
  EXPECT_THAT(refused({"0F0 0F0 0B0"}, 1, 1), HasSubstr("0F0 occurs a second time"));
  EXPECT_THAT(refused({"0F0 0B0 0I0 0W0"}, 1, 1), HasSubstr("0I0 occurs a second time"));
  EXPECT_THAT(refused({"0F0 0SEND_F0 0B0"}, 1, 1), HasSubstr("Expected compute-only schedule"));
  EXPECT_THAT(refused({"0F0 3F0"}, 1, 1), HasSubstr("outside of 1 stages"));
  // Each rank waits for the other rank.
  EXPECT_THAT(refused({"0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"}, 2, 2),
              HasSubstr("wait for ever: rank 0 at 0B0 (step 1), rank 1 at 1F1 (step 0)"));
  EXPECT_THAT(error_of(
                  [] {
                    check_schedule({{row_of("0F0 0B0")}}, {2, 1, 1});
                  },
                  ErrorKind::kConfig),
              HasSubstr("expected 2, actual 1"));
}

TEST(PipelineCheck, LoweredTablesThatDeadlockAreRefused) {
  const auto refused = [](const std::vector<std::string>& rows) {
    ScheduleTable table;
    for (const auto& row : rows) table.ranks.push_back(row_of(row));
    return error_of([&] { check_lowered(table, {0, 1}, 2); }, ErrorKind::kConfig);
  };
  EXPECT_EQ(refused({"0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"}), "no error");
  EXPECT_THAT(refused({"0F0 0RECV_B0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"}),
              HasSubstr("rank 0 at 0RECV_B0, rank 1 at 1RECV_F0 would wait for ever"));
  EXPECT_THAT(refused({"0F0 0SEND_F0", "1F0 1B0"}), HasSubstr("1 SEND_F and 0 RECV_F"));
  EXPECT_THAT(refused({"0F0 1F0", ""}), HasSubstr("another rank's stage"));
}

TEST(PipelineSchedule, NamesAndSizesAreChecked) {
  const auto refused = [](const char* name, const ScheduleSize& size) {
    return error_of([&] { make_schedule(name, size); }, ErrorKind::kConfig);
  };
  EXPECT_THAT(refused("zero_bubble", {2, 1, 2}),
              HasSubstr("Unknown schedule name 'zero_bubble'. The valid options are ['1F1B'"));
  EXPECT_THAT(refused("1f1b", {4, 1, 3}),
              HasSubstr("Number of microbatches (3) must be greater than or equal to the number of stages (4)."));
  EXPECT_THAT(
      refused("DUALPIPEV", {2, 2, 3}),
      HasSubstr("DualPipeV requires at least as many microbatches as stages, but got 3 microbatches and 4 stages."));
  EXPECT_THAT(refused("zbvzerobubble", {2, 3, 3}), HasSubstr("ZBV requires exactly 2 stages per rank, but got 3."));
  EXPECT_THAT(refused("Interleaved1F1B", {2, 2, 5}), HasSubstr("multiple of the number of rounds (2), but got 5."));
  EXPECT_THAT(refused("GPipe", {2, 2, 5}), HasSubstr("found 2 stages a rank, wanted one"));
  EXPECT_THAT(refused("LoopedBFS", {2, 2, 0}), HasSubstr("0 micro-batches"));
}

TEST(PipelineSimulation, BubbleAndHeldMicroBatchesFollowTheFormulas) {
  // For GPipe and 1F1B the bubble is (p - 1) / (n + p - 1) of the time, for every cost of forward and backward.
  for (const char* name : {"GPipe", "1F1B"}) {
    const auto told = simulate(make_schedule(name, {4, 1, 8}));
    EXPECT_NEAR(told.bubble_share, 3.0 / 11, 1e-12) << name;
    EXPECT_DOUBLE_EQ(told.time, 33);
  }
  EXPECT_THAT(simulate(make_schedule("GPipe", {4, 1, 8})).max_held, ElementsAre(8, 8, 8, 8));
  EXPECT_THAT(simulate(make_schedule("1F1B", {4, 1, 8})).max_held, ElementsAre(4, 3, 2, 1));
  // Interleaving divides the bubble by the number of stages per rank.
  const auto interleaved = simulate(make_schedule("Interleaved1F1B", {4, 2, 8}));
  EXPECT_NEAR(interleaved.bubble_share, 3.0 / (2 * 8 + 3), 1e-12);
  EXPECT_LT(simulate(make_schedule("ZBVZeroBubble", {4, 2, 16})).bubble_share, 0.05);
  EXPECT_LT(simulate(make_schedule("InterleavedZeroBubble", {4, 2, 16})).bubble_share, interleaved.bubble_share);
}

TEST(PipelineStages, LayersAreSplitEvenly) {
  EXPECT_THAT(split_layers(32, 4), ElementsAre(8, 8, 8, 8));
  EXPECT_THAT(split_layers(10, 4), ElementsAre(3, 3, 2, 2));
  const auto plan = plan_stages(10, {0, 1, 1, 0});
  EXPECT_EQ(plan.range(2).first_layer, 6);
  EXPECT_EQ(plan.range(2).end_layer, 8);
  EXPECT_TRUE(plan.range(0).is_first && !plan.range(0).is_last && plan.range(3).is_last);
  EXPECT_THAT(plan.stages_of(0), ElementsAre(0, 3));
  EXPECT_THAT(plan_stages(5, {0, 1, 2}, {0, 5, 0}).layers, ElementsAre(0, 5, 0));
  const auto refused = [](const std::function<void()>& call) { return error_of(call, ErrorKind::kConfig); };
  EXPECT_THAT(refused([] { split_layers(3, 4); }), HasSubstr("4 stages of 3 layers"));
  EXPECT_THAT(refused([] { plan_stages(5, {0, 1}, {5}); }), HasSubstr("1 stages, wanted 2"));
  EXPECT_THAT(refused([] { plan_stages(5, {0, 1}, {2, 2}); }), HasSubstr("4 in all, the model has 5"));
  EXPECT_THAT(refused([] { plan_stages(5, {0, 1, 2}, {2, 0, 3}); }), HasSubstr("stage 1 has 0"));
}

TEST(PipelineStages, StagesPerRankFollowFromLayersPerStage) {
  const auto one = schedule_traits("1f1b"), several = schedule_traits("interleaved1f1b");
  EXPECT_EQ(stages_per_rank(one, 32, 4), 1);
  EXPECT_EQ(stages_per_rank(several, 32, 4), 2);
  EXPECT_EQ(stages_per_rank(one, 32, 4, 8), 1);
  EXPECT_EQ(stages_per_rank(several, 32, 4, 2), 4);
  EXPECT_EQ(stages_per_rank(several, 30, 4, 3, "up"), 3);
  EXPECT_EQ(stages_per_rank(several, 30, 4, 3, "down"), 2);
  const auto refused = [](const std::function<void()>& call) { return error_of(call, ErrorKind::kConfig); };
  EXPECT_THAT(refused([&] { stages_per_rank(several, 30, 4, 3); }),
              HasSubstr("are 10 stages, which 4 ranks do not divide"));
  EXPECT_THAT(refused([&] { stages_per_rank(several, 30, 4, 3, "near"); }),
              HasSubstr("found 'near', wanted up or down"));
  EXPECT_THAT(refused([&] { stages_per_rank(one, 32, 4, 4); }), HasSubstr("are 2 stages a rank, wanted one"));
  EXPECT_THAT(refused([&] { stages_per_rank(several, 32, 4, 8); }),
              HasSubstr("are 1 stages a rank, wanted at least two"));
}

}  // namespace
}  // namespace tessera::pipeline
