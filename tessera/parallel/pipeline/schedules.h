// The schedules of torch.distributed.pipelining, as tables.
//
//   Schedule schedule = make_schedule("1F1B", {.ranks = 4, .micro_batches = 8});
//   Schedule v = make_schedule("ZBVZeroBubble", {.ranks = 4, .stages_per_rank = 2, .micro_batches = 8});
//
// Names are torch's in any case: GPipe, 1F1B (one stage a rank), LoopedBFS, Interleaved1F1B, InterleavedZeroBubble
// (stage s lies on rank s mod ranks), ZBVZeroBubble and DualPipeV (two stages a rank, rank r has r and 2 ranks - 1 -
// r). Pure; no communication.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/parallel/pipeline/schedule_table.h"

namespace tessera::pipeline {

enum class StageStyle { kLoop, kV };
// The rank of each stage. Error kConfig: stages that the ranks do not divide.
std::vector<int> stage_to_rank(int ranks, int stages, StageStyle style);

// The stages on a rank, in rising order.
std::vector<int> stages_on(const std::vector<int>& rank_of, int rank);

struct Schedule {
  std::string name;  // as torch writes it; of a table from a file, what the file is called
  int micro_batches = 0;
  std::vector<int> rank_of;  // of each stage
  ScheduleTable table;       // of computations
  int stages() const { return static_cast<int>(rank_of.size()); }
  int ranks() const { return static_cast<int>(table.ranks.size()); }
  std::vector<int> stages_of(int rank) const { return stages_on(rank_of, rank); }
};

// What may be said of a schedule without its numbers. Error kConfig, torch's: "Unknown schedule name ...", for its
// abstract classes too.
struct ScheduleTraits {
  std::string name;
  bool one_stage_a_rank = false;
  StageStyle style = StageStyle::kLoop;
  bool splits_backward = false;  // it has I and W
};
ScheduleTraits schedule_traits(std::string_view name);

struct ScheduleSize {
  int ranks = 1;
  int stages_per_rank = 1;
  int micro_batches = 1;
};
// Errors kConfig, torch's: fewer micro-batches than stages (1F1B, DualPipeV), micro-batches that are no multiple of the
// rounds (interleaved ones), other than two stages a rank (the V ones) or one (GPipe, 1F1B).
Schedule make_schedule(std::string_view name, const ScheduleSize& size);
// Of a table that was read. Errors as check_schedule.
Schedule schedule_of_table(ScheduleTable table, const std::string& name);

}  // namespace tessera::pipeline
