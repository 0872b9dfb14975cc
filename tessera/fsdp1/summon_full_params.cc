#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/fsdp1/fsdp1_state.h"

namespace tessera {

void summon_full_params(nn::Module& module, const SummonOptions& options, const std::function<void()>& body) {
  std::vector<FlatParamGroup*> groups;
  for (const auto& [path, state] : fsdp1_states(module)) {
    if (state->group() && (options.recurse || path.empty())) groups.push_back(state->group().get());
  }
  TESSERA_CHECK(!options.writeback || !options.rank0_only, ErrorKind::kConfig,
                "[fsdp1.summon] writeback=True and rank0_only=True is not supported: the other ranks have nothing to "
                "write back. Set one of them to false.");
  for (const auto* group : groups) {
    TESSERA_CHECK(!options.offload_to_cpu || group->sharded(), ErrorKind::kConfig,
                  "[fsdp1.summon] {}: offload_to_cpu=True and NO_SHARD is not supported. Leave offload_to_cpu out.",
                  group->name());
    TESSERA_CHECK(!options.with_grads || (group->layout().use_orig_params() && !options.offload_to_cpu),
                  ErrorKind::kConfig,
                  "[fsdp1.summon] {}: with_grads=True, use_orig_params={}, offload_to_cpu={} is not supported. Set "
                  "use_orig_params and leave offload_to_cpu off.",
                  group->name(), group->layout().use_orig_params(), options.offload_to_cpu);
  }
  // Restores the sharded parameters of all units, even if restoring one unit throws. Returns the first error. Units are
  // restored in reverse order, since the parameters of inner units were replaced after those of outer units.
  std::vector<FlatParamGroup*> summoned;
  const auto restore = [&] {
    std::exception_ptr first;
    for (auto group = summoned.rbegin(); group != summoned.rend(); ++group) {
      try {
        (*group)->restore_sharded_params(options.writeback);
      } catch (...) {
        if (!first) first = std::current_exception();
      }
    }
    return first;
  };
  try {
    for (auto* group : groups) {
      group->gather_full_params({.on_this_rank = !options.rank0_only || group->group()->rank() == 0,
                                 .on_cpu = options.offload_to_cpu,
                                 .gradients = options.with_grads});
      summoned.push_back(group);
    }
    body();
  } catch (...) {
    if (restore()) log_error("[fsdp1.summon] changes of the body were not written back: restoring a unit failed");
    throw;
  }
  if (const auto failure = restore()) std::rethrow_exception(failure);
}

}  // namespace tessera
