#include "tessera/parallel/ddp/replicate.h"

#include "tessera/base/error.h"
#include "tessera/parallel/ddp/replicate_state.h"
#include "tessera/parallel/modules/check_mesh.h"

namespace tessera {
namespace {

ReplicateState& state_of(nn::Module& module) {
  auto* state = replicate_state(module);
  TESSERA_CHECK(state != nullptr, ErrorKind::kShape,
                "[replicate.stats] this module is not replicated. Call replicate on it first.");
  return *state;
}

}  // namespace

void replicate(nn::Module& module, const ReplicateOptions& options) {
  check_one_dim_mesh(options.mesh, "replicate", "dp_replicate");
  TESSERA_CHECK(options.bucket_bytes > 0 && options.first_bucket_bytes > 0, ErrorKind::kShape,
                "[replicate] bucket_bytes {} and first_bucket_bytes {}: wanted positive sizes", options.bucket_bytes,
                options.first_bucket_bytes);
  TESSERA_CHECK(data_parallel_states(module).empty(), ErrorKind::kShape,
                "[replicate] fully_shard or replicate was called on this module or one below it already. Use one of "
                "the two, once.");
  auto state = std::make_shared<ReplicateState>(module, options);
  module.set_sharding(state);
  state->install_hooks();
}

ReplicateStats replicate_stats(nn::Module& module) { return state_of(module).stats(); }

void reset_replicate_stats(nn::Module& module) {
  auto& stats = state_of(module).stats();
  stats.all_reduces = stats.overlapped = 0;
}

}  // namespace tessera
