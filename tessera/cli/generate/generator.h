// The source of tokens for `tessera generate`: an engine whose model may be sharded over several ranks.
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
  // Loads the model. Without `cache_tokens` the KV cache has tokens for one sequence of the full context length, or
  // with --batch for 64 of them, or fewer if memory is short. COLLECTIVE over the world.
  Generator(const GenerateFlags& flags, const ModelConfig& config, std::optional<int64_t> cache_tokens,
            std::shared_ptr<comm::World> world);
  Generator(const Generator&) = delete;
  Generator& operator=(const Generator&) = delete;

  // On all ranks except rank 0: runs the forwards of rank 0's engine on this rank's shard of the model, until rank 0
  // destroys its engine. COLLECTIVE over the world: rank 0 calls run() or steps the engine meanwhile.
  void follow();
  // On rank 0: generates one sequence to its end. Throws the Error that ends the sequence early; the callback of the
  // request is called for tokens only, not for the error.
  void run(GenerationRequest request);
  Engine& engine() { return *engine_; }  // on rank 0 only

 private:
  std::shared_ptr<comm::World> world_;
  std::shared_ptr<CausalLM> model_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace tessera::cli
