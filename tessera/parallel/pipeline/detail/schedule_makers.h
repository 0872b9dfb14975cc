// Makes the rows of each schedule, one per rank.
#pragma once

#include "tessera/parallel/pipeline/schedules.h"

namespace tessera::pipeline::detail {

using ScheduleRows = std::vector<ActionRow>;

// Inserts bubbles before each action whose input is not ready, assuming that every action takes one time step. With one
// stage per rank forwards and backwards are delayed, otherwise only forwards. Semantics of torch's
// _add_bubbles_to_actions.
ScheduleRows with_bubbles(const ScheduleRows& rows, bool one_stage_per_rank);

// Returns the rows of GPipe (last_first false) or LoopedBFS (last_first true): each rank runs all forwards and then all
// backwards. With last_first the backwards of each stage begin with the last micro-batch.
ScheduleRows forwards_then_backwards_rows(const ScheduleSize& size, bool last_first);
ScheduleRows one_forward_one_backward_rows(const ScheduleSize& size);
ScheduleRows interleaved_rows(const ScheduleSize& size, bool zero_bubble);
ScheduleRows zbv_rows(const ScheduleSize& size);
ScheduleRows dual_pipe_v_rows(const ScheduleSize& size);

}  // namespace tessera::pipeline::detail
