// The steps of an engine on ranks that hold its model together.
//
//   Engine engine(model, {.pages = pages, .group = group});   // the leader: adds sequences, chooses tokens
//   follow_steps(*model, *group);                             // the others, until that engine ends
//
// The leader broadcasts what each forward computes, a few numbers for each of its tokens, and all ranks run that
// forward. The others know nothing of sequences. An engine that has nothing to do broadcasts that the others shall wait
// on (Engine::keep_alive), so that no collective lasts longer than its time-out allows.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/comm/group/group.h"
#include "tessera/models/generation/step_rows.h"

namespace tessera {

// The numbers of rank `root`, on all ranks. COLLECTIVE over the group.
std::vector<int64_t> broadcast_numbers(comm::Group& group, std::span<const int64_t> numbers, int root);

// What an engine broadcasts. Each is COLLECTIVE over the group, together with follow_steps; the caller is the leader.
void tell_begin(comm::Group& group, int64_t pages);
void tell_rows(comm::Group& group, const StepRows& rows);
void tell_wait(comm::Group& group);
void tell_end(comm::Group& group);

// Runs what the engine of rank `leader` broadcasts until that engine ends. COLLECTIVE over the group, but for the
// leader. Throws what a forward throws, and PeerFailed where a rank is gone.
void follow_steps(CausalLM& model, comm::Group& group);
void follow_steps(const ModelConfig& config, const RowsForward& forward, comm::Group& group, int leader);

}  // namespace tessera
