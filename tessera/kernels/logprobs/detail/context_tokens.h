// How many tokens the ranks of a context-parallel group have. Internal to the log-probs.
//
//   const auto layout = detail::balanced_layout(verb, detail::tokens_of_ranks(*group, own, device));
#pragma once

#include <vector>

#include "tessera/kernels/attention/context_layout.h"

namespace tessera::kernels::detail {

// COLLECTIVE over the group.
std::vector<int64_t> tokens_of_ranks(comm::Group& group, int64_t own, const at::Device& device);
// Error kShape, on all ranks, unless that is how a balanced sequence lies.
ContextLayout balanced_layout(const char* verb, const std::vector<int64_t>& tokens_of_ranks);

}  // namespace tessera::kernels::detail
