// The steps of an engine on ranks that share its model.
//
//   Engine engine(model, {.pages = pages, .group = group});   // the leader: adds sequences, chooses tokens
//   run_engine_follower(*model, *group);                             // the others, until that engine ends
//
// The leader broadcasts the inputs of each forward pass, a few numbers for each token, and all ranks run the same
// forward. The other ranks know no sequences. An engine without work broadcasts that the others shall wait
// (Engine::keep_alive), so that no collective lasts longer than its time-out.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/comm/group/group.h"
#include "tessera/models/generation/step_rows.h"

namespace tessera {

// Returns the numbers of rank `root` on all ranks. COLLECTIVE over the group.
std::vector<int64_t> broadcast_numbers(comm::Group& group, std::span<const int64_t> numbers, int root);

// The messages of an engine. Each function is called by the leader and is COLLECTIVE over the group, together with
// run_engine_follower on the other ranks.
void broadcast_begin(comm::Group& group, int64_t pages);
void broadcast_rows(comm::Group& group, const StepRows& rows);
void broadcast_wait(comm::Group& group);
void broadcast_end(comm::Group& group);

// Runs the forward passes that the engine of rank `leader` broadcasts, until that engine ends. COLLECTIVE over the
// group, on all ranks except the leader. Throws the errors of a forward, and PeerFailed when a rank has failed.
void run_engine_follower(CausalLM& model, comm::Group& group);
void run_engine_follower(const ModelConfig& config, const RowsForward& forward, comm::Group& group, int leader);

}  // namespace tessera
