// Checks that a schedule table can run without deadlock, and simulates its time, bubbles and held micro-batches.
//
//   auto rank_of = check_schedule(table, {.ranks = 4, .stages = 8, .micro_batches = 16});
//   Simulation simulation = simulate(schedule, {.forward = 1, .backward = 2});
//   simulation.bubble_share;            // 0.27: idle share of the time of all ranks
//
// Pure functions; no communication.
#pragma once

#include <vector>

#include "tessera/parallel/pipeline/schedules.h"

namespace tessera::pipeline {

struct ScheduleExtent {
  int ranks = 1, stages = 1, micro_batches = 1;
};
// Checks a table of computations: each stage and micro-batch has one F, and then either one B, or one I and one W; each
// stage is on one rank; and no rank waits for ever. Returns the rank of each stage. Error kConfig names the rank and
// the step, and shows the table.
std::vector<int> check_schedule(const ScheduleTable& table, const ScheduleExtent& extent);

// Checks a lowered table (lowering.h), whose actions run in order on every rank: each send must have one receive, each
// receive a send that runs before it, and the inputs of each computation must be on its rank. Error kConfig lists the
// action that each rank waits at.
void check_lowered(const ScheduleTable& lowered, const std::vector<int>& rank_of, int micro_batches);

struct ActionCosts {
  // The time that each action takes, in any unit. An OVERLAP_F_B action takes the sum of the times of its parts.
  double forward = 1, backward = 2, input_backward = 1, weight_backward = 1;
};
// The result of running a schedule with messages that take no time.
struct Simulation {
  double time = 0;          // until the last rank is done, in the units of ActionCosts
  double bubble_share = 0;  // idle share of (ranks x time)
  // Per rank: the largest number of (stage, micro-batch) pairs whose forward has run and whose backward (B or W) has
  // not.
  std::vector<int> max_held;
};
Simulation simulate(const Schedule& schedule, const ActionCosts& costs = {});

}  // namespace tessera::pipeline
