// Where `tessera generate` gets its tokens from: an engine, whose model several ranks may hold together.
//
//   Generator generator({.model = dir, .dtype = "bfloat16", .contexts = 64}, config, world);
//   if (!generator.leads()) return generator.follow();      // ranks but the first
//   generator.run({.prompt = ids, .options = options, .on_token = ...});
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "tessera/models/generation/engine.h"

namespace tessera::comm {
class World;
}

namespace tessera::cli {

struct GeneratorOptions {
  std::string model, dtype, device = "auto";
  std::optional<int64_t> cache_tokens{};  // none: `contexts`, as far as there is room for them
  int64_t contexts = 1;
};

class Generator {
 public:
  // Loads the model. COLLECTIVE over the world, as what follows.
  Generator(const GeneratorOptions& options, const ModelConfig& config, std::shared_ptr<comm::World> world);
  Generator(const Generator&) = delete;
  Generator& operator=(const Generator&) = delete;

  bool leads() const { return engine_ != nullptr; }
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
