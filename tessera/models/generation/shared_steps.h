// The steps of an engine on ranks that hold its model together.
//
//   Engine engine(model, {.pages = pages, .group = group});   // the first rank: adds sequences, chooses tokens
//   follow_steps(*model, *group);                             // the others, until that engine ends
//
// The first rank tells what each forward computes, a few numbers for each of its tokens, and all run it. The others
// know nothing of sequences. An engine that has nothing to do tells them to wait on (Engine::keep_alive), so that no
// collective lasts longer than its time-out allows.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/comm/group/group.h"
#include "tessera/models/decoder/causal_lm.h"
#include "tessera/nn/attention/paged_cache.h"

namespace tessera {

// One forward over rows of several sequences.
struct StepRows {
  std::vector<int64_t> tokens{}, positions{};  // of each row
  std::vector<int64_t> rotary_lengths{};  // of each row, as in ModelInputs; empty unless the model's rope is dynamic
  std::vector<kernels::PagedTokens> sequences{};
  std::vector<int64_t> wanted{};  // rows whose logits count
};

// Their logits [wanted, V], float32 on the CPU. COLLECTIVE over the ranks that hold the model.
at::Tensor run_rows(CausalLM& model, nn::PageStore& store, const StepRows& rows, at::Device device);

// What an engine tells the other ranks. Each is COLLECTIVE over the group, together with follow_steps.
void tell_begin(comm::Group& group, int64_t pages);
void tell_rows(comm::Group& group, const StepRows& rows);
void tell_wait(comm::Group& group);
void tell_end(comm::Group& group);

// COLLECTIVE over the group, but for its first rank. Throws what a forward throws, and PeerFailed where a rank is gone.
void follow_steps(CausalLM& model, comm::Group& group);

}  // namespace tessera
