// Lowers a table of computations to the actions that the ranks run: adds sends and receives, gathering and freeing of
// parameters, and gradient reductions. The passes and the order of actions are those of torch.distributed.pipelining.
//
//   ScheduleTable lowered = lower(schedule);
//
// Pure functions; no communication.
#pragma once

#include "tessera/parallel/pipeline/schedules.h"

namespace tessera::pipeline {

using Actions = std::vector<Action>;

// Adds UNSHARD and RESHARD. Before each action the active stages are the next `max_active` different stages that the
// row computes on: a stage that becomes active gets an UNSHARD, and a stage that is no longer active gets a RESHARD.
Actions add_unshard_reshard(const ActionRow& row, int max_active = 3);
// Adds REDUCE_GRAD after the last B or W of each stage.
Actions add_reduce_grad(const Actions& row, int micro_batches);
// Merges each I, if the next action is the W of the same stage and micro-batch, with this W into one B.
Actions merge_bw(const ActionRow& row);
// Adds a SEND after each computation whose result another rank needs, and the RECV to that rank's row. The messages
// between two ranks have the same order in both rows. Error kConfig: a table in which a rank waits for ever.
std::vector<Actions> add_send_recv(const std::vector<Actions>& rows, const std::vector<int>& rank_of);

// Applies add_unshard_reshard, add_reduce_grad and add_send_recv.
ScheduleTable lower(const Schedule& schedule);
// A lowered table of forwards: each rank runs its stages in order, all micro-batches of a stage before the next stage.
ScheduleTable lower_forward(const std::vector<int>& rank_of, int ranks, int micro_batches);

}  // namespace tessera::pipeline
