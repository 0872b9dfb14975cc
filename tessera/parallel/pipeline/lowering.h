// From a table of computations to what the ranks run: with sends and receives, gathering and freeing of parameters, and
// the reduction of gradients. Passes and order of actions are those of torch.distributed.pipelining.
//
//   ScheduleTable lowered = lower(schedule);
//
// Pure; no communication.
#pragma once

#include "tessera/parallel/pipeline/schedules.h"

namespace tessera::pipeline {

using Actions = std::vector<Action>;

// UNSHARD before the first of the next `most_active` stages that a rank computes on, RESHARD of those that are not
// among them any more.
Actions add_unshard_reshard(const ActionRow& row, int most_active = 3);
// REDUCE_GRAD behind the last B or W of each stage.
Actions add_reduce_grad(const Actions& row, int micro_batches);
// I and the W right behind it as one B.
Actions merge_bw(const ActionRow& row);
// SEND behind what computes for another rank, and its RECV on that rank, in one order over all ranks: those between two
// ranks are in the same order on both. Error kConfig: a table in which ranks wait for ever.
std::vector<Actions> add_send_recv(const std::vector<Actions>& rows, const std::vector<int>& rank_of);

// All of these but merge_bw.
ScheduleTable lower(const Schedule& schedule);
// Forward alone: each rank's stages in order, all micro-batches of one before the next.
ScheduleTable lower_forward(const std::vector<int>& rank_of, int ranks, int micro_batches);

}  // namespace tessera::pipeline
