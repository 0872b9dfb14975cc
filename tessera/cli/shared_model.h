// A model for generation that the ranks of a world hold together, be it one.
//
//   const auto model = load_shared(dir, "bfloat16", config, device, world);
//   if (world->rank() > 0) return follow_steps(*model, *world->group());      // the first has the engine
#pragma once

#include <memory>
#include <string>

#include "tessera/models/decoder/causal_lm.h"

namespace tessera::comm {
class Group;
class World;
}  // namespace tessera::comm

namespace tessera::cli {

// One rank: load_for_generation's. Several: tensor parallel where the ranks divide its heads, else its layers are
// sharded and gathered one by one. COLLECTIVE over the world. Error kConfig for packed dtypes, which run on one rank.
std::shared_ptr<CausalLM> load_shared(const std::string& dir, const std::string& dtype, const ModelConfig& config,
                                      at::Device device, const std::shared_ptr<comm::World>& world);
// What a cache of that model should hold, cache_room.h's, at most what each rank has room for. COLLECTIVE over the
// world.
int64_t shared_cache_tokens(CausalLM& model, int64_t wanted, comm::World& world);
// Before a cache of so many tokens is made: check_cache_fits of cache_room.h, where the model lies in the CPU's memory.
void check_shared_cache(CausalLM& model, int64_t tokens, comm::World& world);
// Of an engine with such a model: none for one rank.
std::shared_ptr<comm::Group> engine_group(comm::World& world);

}  // namespace tessera::cli
