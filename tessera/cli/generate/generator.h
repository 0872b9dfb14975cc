// Where `tessera generate` gets its tokens from: an engine, whose model several ranks may hold together.
//
//   Generator generator(flags, config, cache_tokens, world);
//   if (world->rank() > 0) return generator.follow();
//   generator.run({.prompt = ids, .options = options, .on_token = ...});
#pragma once

#include <memory>
#include <optional>

#include "tessera/cli/generate/generate_flags.h"
#include "tessera/models/generation/engine.h"

namespace tessera::comm {
class World;
}

namespace tessera::cli {

class Generator {
 public:
  // Loads the model. Without `cache_tokens` the cache holds one context, or those of a batch, as far as there is room
  // for them. COLLECTIVE over the world, as what follows.
  Generator(const GenerateFlags& flags, const ModelConfig& config, std::optional<int64_t> cache_tokens,
            std::shared_ptr<comm::World> world);
  Generator(const Generator&) = delete;
  Generator& operator=(const Generator&) = delete;

  // Computes what the first rank asks for until it ends.
  void follow();
  // On the first rank: one sequence to its end. Throws what ends it early; its callback sees tokens alone.
  void run(GenerationRequest request);
  Engine& engine() { return *engine_; }  // of the first rank

 private:
  std::shared_ptr<comm::World> world_;
  std::shared_ptr<CausalLM> model_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace tessera::cli
