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
  // Loads the model. Without `cache_tokens` the KV cache holds one context, or with --batch 64 contexts, as far as
  // memory allows. COLLECTIVE over the world.
  Generator(const GenerateFlags& flags, const ModelConfig& config, std::optional<int64_t> cache_tokens,
            std::shared_ptr<comm::World> world);
  Generator(const Generator&) = delete;
  Generator& operator=(const Generator&) = delete;

  // On all ranks except rank 0: takes part in the steps of rank 0's engine until rank 0 ends. COLLECTIVE over the
  // world, together with run() and the engine on rank 0.
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
