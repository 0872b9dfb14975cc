// Whether a table can be run, and what it costs: each action exactly once, after what it needs; no deadlock; bubbles;
// micro-batches held.
//
//   auto rank_of = check_schedule(table, {.ranks = 4, .stages = 8, .micro_batches = 16});
//   Simulation told = simulate(schedule, {.forward = 1, .backward = 2});
//   told.bubble_share;                  // 0.27: of the time of all ranks
//
// Pure; no communication.
#pragma once

#include <vector>

#include "tessera/parallel/pipeline/schedules.h"

namespace tessera::pipeline {

struct ScheduleExtent {
  int ranks = 1, stages = 1, micro_batches = 1;
};
// Of a table of computations: F of each stage and micro-batch once, then B or I and W once, each stage on one rank, in
// an order in which no rank waits for ever. Returns the rank of each stage. Error kConfig says which rank and step, and
// shows the table.
std::vector<int> check_schedule(const ScheduleTable& table, const ScheduleExtent& extent);

// Of a lowered table (lowering.h), run in order on every rank: a receive waits until the other side has come to its
// send; each send has one receive; computations find what they need on their rank. Error kConfig with what each rank
// waits for.
void check_lowered(const ScheduleTable& lowered, const std::vector<int>& rank_of, int micro_batches);

struct ActionCosts {
  double forward = 1, backward = 2, input_backward = 1, weight_backward = 1;  // an overlap costs the sum of its parts
};
struct Simulation {
  double time = 0;          // until the last rank is done, where messages take none
  double bubble_share = 0;  // of ranks x time
  // Per rank, over its stages: micro-batches that went forward and whose backward (B or W) is still to come, at most.
  std::vector<int> most_held;
};
Simulation simulate(const Schedule& schedule, const ActionCosts& costs = {});

}  // namespace tessera::pipeline
