#include "tessera/cli/generator.h"

#include <algorithm>
#include <cstring>

#include "tessera/base/copy_bytes.h"
#include "tessera/base/error.h"
#include "tessera/cli/flags.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/rendezvous/device_choice.h"
#include "tessera/comm/rendezvous/world.h"
#include "tessera/kernels/linear.h"
#include "tessera/models/generation/load.h"
#include "tessera/models/weights.h"
#include "tessera/parallel/data_parallel.h"

namespace tessera::cli {
namespace {

std::shared_ptr<CausalLM> load_sharded(const GeneratorOptions& options, const ModelConfig& config, at::Device device,
                                       const std::shared_ptr<comm::World>& world) {
  TESSERA_CHECK(!packed_row_dtype(options.dtype), ErrorKind::kConfig,
                "[generate] --dtype {} runs on one rank, found {}. Take bfloat16, or leave out --nproc.", options.dtype,
                world->size());
  const auto dtype = parse_dtype_flag("generate", options.dtype);
  auto model = make_model(config, {.dtype = dtype.value_or(config.dtype.value_or(at::kFloat)), .device = at::kMeta});
  std::vector<nn::Module*> blocks;
  for (const auto& block : model->blocks()) blocks.push_back(block.get());
  const auto type = c10::DeviceTypeName(device.type(), /*lower_case=*/true);
  const auto mesh = init_device_mesh(world, type, {world->size()}, {"dp_shard"});
  fully_shard_blocks(*model, blocks, {.mesh = mesh});
  to_empty(*model, device);
  load_pretrained(*model, options.model);
  return model;
}

// The prompt and how many tokens may follow, for ranks that do not choose; empty: the end.
std::string as_bytes(std::span<const int64_t> numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size_bytes()};
}

std::vector<int64_t> as_numbers(const std::string& bytes) {
  std::vector<int64_t> numbers(bytes.size() / sizeof(int64_t));
  copy_bytes(numbers.data(), bytes.data(), numbers.size() * sizeof(int64_t));
  return numbers;
}

}  // namespace

Generator::Generator(const GeneratorOptions& options, const ModelConfig& config, std::shared_ptr<comm::World> world)
    : world_(std::move(world)) {
  const auto device = comm::choose_device(*world_, {.setting = options.device, .key = "--device"});
  if (world_->size() > 1) {
    agree_on_linear_kernel(*world_->group());
    model_ = load_sharded(options, config, device, world_);
    return;
  }
  model_ = load_for_generation(options.model, options.dtype, device);
  engine_ = std::make_unique<Engine>(model_, EngineOptions{.pages = Engine::pages_for(options.cache_tokens)});
}

Generator::~Generator() {
  // After an error within a generation the others see this rank go.
  if (model_ && world_->size() > 1 && leads() && !generating_) comm::broadcast_bytes(*world_->group(), "");
}

bool Generator::leads() const { return world_->rank() == 0; }

void Generator::follow() {
  while (true) {
    auto prompt = as_numbers(comm::broadcast_bytes(*world_->group(), ""));
    if (prompt.empty()) return;
    const GenerationOptions options{.max_new_tokens = prompt.back()};
    prompt.pop_back();
    generate(*model_, prompt, options, {}, world_->group().get());
  }
}

void Generator::run(GenerationRequest request) {
  if (engine_) {
    std::optional<Error> error;
    request.on_token = [&error, told = std::move(request.on_token)](const NewToken& made) {
      error = made.error;
      return !error && told(made);
    };
    engine_->add(std::move(request));
    while (engine_->step()) {
    }
    if (error) throw Error(*error);
    return;
  }
  generation_capacity(model_->config(), request.prompt, request.options);  // its errors, before the others are told
  generating_ = true;
  auto told = request.prompt;
  told.push_back(request.options.max_new_tokens);
  comm::broadcast_bytes(*world_->group(), as_bytes(told));
  const auto& stops = request.options.stop_tokens;
  int64_t left = generation_capacity(model_->config(), request.prompt, request.options) -
                 static_cast<int64_t>(request.prompt.size());
  generate(
      *model_, request.prompt, request.options,
      [&](int64_t token) {
        NewToken made{.token = token};
        --left;
        if (std::find(stops.begin(), stops.end(), token) != stops.end()) {
          made.finish = Finish::kStop;
        } else if (left == 0) {
          made.finish = Finish::kLength;
        }
        return request.on_token(made);
      },
      world_->group().get());
  generating_ = false;
}

}  // namespace tessera::cli
