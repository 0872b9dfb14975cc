// A model for generation that is sharded over the ranks of a world, which may also be a single rank.
//
//   const auto model = load_sharded_model(dir, "bfloat16", config, device, world);
//   if (world->rank() > 0) return run_engine_follower(*model, *world->group());      // rank 0 has the engine
#pragma once

#include <memory>
#include <string>

#include "tessera/models/decoder/causal_lm.h"

namespace tessera::comm {
class Group;
class World;
}  // namespace tessera::comm

namespace tessera::cli {

// On one rank: load_for_generation(). On several ranks: tensor parallel if their number divides the head counts, else
// fully sharded (dp_shard), with one layer after the other unsharded for its forward. COLLECTIVE over the world. Error
// kConfig for a packed dtype (int8, int4) on several ranks.
std::shared_ptr<CausalLM> load_sharded_model(const std::string& dir, const std::string& dtype,
                                             const ModelConfig& config, at::Device device,
                                             const std::shared_ptr<comm::World>& world);
// The size of the KV cache in tokens: `requested_tokens`, or less if the memory of a rank is not enough for them
// (cache_tokens() of cache_memory.h). COLLECTIVE over the world.
int64_t shared_cache_tokens(CausalLM& model, int64_t requested_tokens, comm::World& world);
// Must be called before a KV cache of `tokens` tokens is created. For a model in CPU memory it calls check_cache_fits()
// of cache_memory.h; for other models it does nothing.
void check_shared_cache(CausalLM& model, int64_t tokens, comm::World& world);
// The group for EngineOptions: the group of the world, null for one rank.
std::shared_ptr<comm::Group> engine_group(comm::World& world);

}  // namespace tessera::cli
