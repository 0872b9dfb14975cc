// The rows of each schedule, rank by rank.
#pragma once

#include "tessera/parallel/pipeline/schedules.h"

namespace tessera::pipeline::detail {

using Rows = std::vector<ActionRow>;

// Puts bubbles before each action whose input is not there yet, where every action takes one time step. Backwards are
// delayed too where each rank has one stage, else forwards alone (torch's _add_bubbles_to_actions).
Rows with_bubbles(const Rows& rows, bool one_stage_a_rank);

// GPipe and LoopedBFS. last_first: backwards begin with the last micro-batch.
Rows forwards_then_backwards_rows(const ScheduleSize& size, bool last_first);
Rows one_forward_one_backward_rows(const ScheduleSize& size);
Rows interleaved_rows(const ScheduleSize& size, bool zero_bubble);
Rows zbv_rows(const ScheduleSize& size);
Rows dual_pipe_v_rows(const ScheduleSize& size);

}  // namespace tessera::pipeline::detail
