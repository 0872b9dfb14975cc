// Runs the forward passes of an engine on the other ranks of its group. These ranks have shards of the engine's model.
//
//   Engine engine(model, {.pages = pages, .group = group});   // the leader: adds sequences, chooses tokens
//   run_engine_follower(*model, *group);                             // all other ranks, until the engine is destroyed
//
// The leader broadcasts the inputs of each forward pass, a few numbers for each token, and all ranks run the same
// forward. Only the leader schedules sequences. A leader without work broadcasts messages that do nothing
// (Engine::keep_alive), so that the other ranks' broadcast call does not exceed its time-out.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/comm/group/group.h"
#include "tessera/models/generation/step_rows.h"

namespace tessera {

// Broadcasts `numbers` of rank `root` and returns them on all ranks. COLLECTIVE over the group.
std::vector<int64_t> broadcast_numbers(comm::Group& group, std::span<const int64_t> numbers, int root);

// These functions broadcast the messages of an engine. Only the leader calls them; the other ranks receive the messages
// in run_engine_follower. COLLECTIVE over the group.
void broadcast_begin(comm::Group& group, int64_t pages);
void broadcast_rows(comm::Group& group, const StepRows& rows);
void broadcast_wait(comm::Group& group);
void broadcast_end(comm::Group& group);

// Runs the forward passes that the engine of rank `leader` broadcasts, until that engine ends. COLLECTIVE over the
// group, on all ranks except the leader. Throws the errors of a forward, and PeerFailed when a rank has failed.
void run_engine_follower(CausalLM& model, comm::Group& group);
void run_engine_follower(const ModelConfig& config, const RowsForward& forward, comm::Group& group, int leader);

}  // namespace tessera
