// The rows of each schedule, rank by rank.
#pragma once

#include "tessera/parallel/pipeline/schedules.h"

namespace tessera::pipeline::detail {

using Rows = std::vector<ActionRow>;

Rows gpipe_rows(const ScheduleSize& size);
Rows one_forward_one_backward_rows(const ScheduleSize& size);
Rows looped_bfs_rows(const ScheduleSize& size);
Rows interleaved_rows(const ScheduleSize& size, bool zero_bubble);
Rows zbv_rows(const ScheduleSize& size);
Rows dual_pipe_v_rows(const ScheduleSize& size);

}  // namespace tessera::pipeline::detail
