// Where `tessera generate` gets its tokens from: an engine on one rank, or a model that is sharded over several.
//
//   Generator generator({.model = dir, .dtype = "bfloat16", .cache_tokens = 8192}, config, world);
//   if (!generator.leads()) return generator.follow();      // ranks but the first
//   generator.run({.prompt = ids, .options = options, .on_token = ...});
#pragma once

#include <memory>
#include <string>

#include "tessera/models/generation/engine.h"

namespace tessera::comm {
class World;
}

namespace tessera::cli {

struct GeneratorOptions {
  std::string model, dtype, device = "auto";
  int64_t cache_tokens = 0;
};

class Generator {
 public:
  // Loads the model. COLLECTIVE over the world.
  Generator(const GeneratorOptions& options, const ModelConfig& config, std::shared_ptr<comm::World> world);
  // Tells the other ranks to end.
  ~Generator();
  Generator(const Generator&) = delete;
  Generator& operator=(const Generator&) = delete;

  bool leads() const;
  // Computes what the first rank asks for until it ends.
  void follow();
  // On the first rank: one sequence to its end. Throws what ends it early; its callback sees tokens alone.
  void run(GenerationRequest request);
  Engine* engine() { return engine_.get(); }  // null where the model is sharded

 private:
  std::shared_ptr<comm::World> world_;
  std::shared_ptr<CausalLM> model_;
  std::unique_ptr<Engine> engine_;
  bool generating_ = false;  // other ranks compute with this one
};

}  // namespace tessera::cli
