// The schedules of torch.distributed.pipelining, as tables.
//
//   Schedule schedule = make_schedule("1F1B", {.ranks = 4, .micro_batches = 8});
//   Schedule v = make_schedule("ZBVZeroBubble", {.ranks = 4, .stages_per_rank = 2, .micro_batches = 8});
//
// Names are those of torch, in upper or lower case: GPipe and 1F1B (one stage per rank); LoopedBFS, Interleaved1F1B and
// InterleavedZeroBubble (stage s is on rank s mod ranks); ZBVZeroBubble and DualPipeV (two stages per rank; rank r has
// the stages r and 2 * ranks - 1 - r). Pure functions; no communication.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/parallel/pipeline/schedule_table.h"

namespace tessera::pipeline {

// kLoop: stage s is on rank s mod ranks. kV: the direction changes after every `ranks` stages, for example ranks 0, 1,
// 1, 0 for four stages.
enum class StageStyle { kLoop, kV };
// The rank of each stage. Error kConfig: `ranks` does not divide `stages`.
std::vector<int> stage_to_rank(int ranks, int stages, StageStyle style);

// The stages on a rank, in ascending order.
std::vector<int> stages_of_rank(const std::vector<int>& rank_of, int rank);

struct Schedule {
  std::string name;  // torch's spelling; for a table from a file, the name of the file
  int micro_batches = 0;
  std::vector<int> rank_of;  // rank of each stage
  ScheduleTable table;       // computations alone, without sends and receives
  int stages() const { return static_cast<int>(rank_of.size()); }
  int ranks() const { return static_cast<int>(table.ranks.size()); }
  std::vector<int> stages_of(int rank) const { return stages_of_rank(rank_of, rank); }
};

// The properties of a schedule that do not depend on ScheduleSize. For an unknown name schedule_traits raises Error
// kConfig with torch's message "Unknown schedule name ...". The names of torch's abstract schedule classes count as
// unknown.
struct ScheduleTraits {
  std::string name;
  bool one_stage_per_rank = false;  // exactly one stage per rank
  StageStyle style = StageStyle::kLoop;
  bool splits_backward = false;  // its backward is split into I and W
};
ScheduleTraits schedule_traits(std::string_view name);

struct ScheduleSize {
  int ranks = 1;
  int stages_per_rank = 1;
  int micro_batches = 1;
};
// Makes the table of a schedule. Errors kConfig, as torch: fewer micro-batches than stages (1F1B, DualPipeV);
// micro-batches that are not a multiple of the number of rounds, max(1, micro_batches / ranks) (the interleaved
// schedules); a number of stages per rank other than two (ZBVZeroBubble, DualPipeV) or one (GPipe, 1F1B).
Schedule make_schedule(std::string_view name, const ScheduleSize& size);
// Makes a schedule from a table that was read from a file. Errors as check_schedule.
Schedule schedule_of_table(ScheduleTable table, const std::string& name);

}  // namespace tessera::pipeline
