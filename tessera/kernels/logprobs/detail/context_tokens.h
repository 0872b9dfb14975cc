// Numbers of tokens on the ranks of a context-parallel group. Internal to the log-probs.
//
//   const auto layout = detail::balanced_layout(verb, detail::tokens_of_ranks(*group, own, device));
#pragma once

#include <vector>

#include "tessera/kernels/attention/context_layout.h"

namespace tessera::kernels::detail {

// All-gathers `own`, the number of tokens on this rank. COLLECTIVE over the group.
std::vector<int64_t> tokens_of_ranks(comm::Group& group, int64_t own, const at::Device& device);
// Returns the balanced ContextLayout in which rank r holds tokens_of_ranks[r] tokens. Error kShape on all ranks when
// there is no such layout.
ContextLayout balanced_layout(const char* verb, const std::vector<int64_t>& tokens_of_ranks);

}  // namespace tessera::kernels::detail
