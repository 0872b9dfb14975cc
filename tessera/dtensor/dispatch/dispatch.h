// For handlers of operations that take over some calls and leave others to the rules.
#pragma once

#include <string>

#include "tessera/dtensor/dispatch/plan.h"

namespace tessera::detail {

// What a call without a handler does. Dispatch must be below autograd.
void dispatch_by_rule(const OpEntry& op, c10::DispatchKeySet keys, Stack& stack);

// Of rules/loss_parallel.cc; null for other operations.
Handler find_loss_parallel_handler(const std::string& name);

}  // namespace tessera::detail
