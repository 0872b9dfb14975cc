#include "tessera/cli/generate/generator.h"

#include "tessera/base/error.h"
#include "tessera/cli/sharded_model.h"
#include "tessera/comm/rendezvous/device_choice.h"
#include "tessera/comm/rendezvous/world.h"
#include "tessera/models/generation/engine_follower.h"

namespace tessera::cli {

Generator::Generator(const GenerateFlags& flags, const ModelConfig& config, std::optional<int64_t> cache_tokens,
                     std::shared_ptr<comm::World> world)
    : world_(std::move(world)) {
  const auto device = comm::choose_device(*world_, {.setting = flags.device, .key = "--device"});
  model_ = load_sharded_model(flags.model, flags.dtype, config, device, world_);
  const int64_t contexts = flags.batch.empty() ? 1 : 64;
  if (!cache_tokens) cache_tokens = shared_cache_tokens(*model_, contexts * config.context_tokens, *world_);
  if (world_->rank() > 0) return;
  engine_ = std::make_unique<Engine>(
      model_, EngineOptions{.pages = Engine::pages_for(*cache_tokens), .group = engine_group(*world_)});
}

void Generator::follow() { run_engine_follower(*model_, *world_->group()); }

// The engine passes the error of a sequence to the callback of the sequence. The callback made here stores the error,
// and run() throws it after the engine's last step.
void Generator::run(GenerationRequest request) {
  std::optional<Error> error;
  request.on_token = [&error, caller_callback = std::move(request.on_token)](const NewToken& made) {
    error = made.error;
    return !error && caller_callback(made);
  };
  engine_->add(std::move(request));
  while (engine_->step()) {
  }
  if (error) throw Error(*error);
}

}  // namespace tessera::cli
