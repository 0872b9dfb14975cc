#include "tessera/cli/sharded_model.h"

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/machine/available_memory.h"
#include "tessera/cli/flags.h"
#include "tessera/comm/collectives/collectives.h"
#include "tessera/comm/rendezvous/world.h"
#include "tessera/kernels/linear/linear.h"
#include "tessera/models/files/weights.h"
#include "tessera/models/generation/cache_memory.h"
#include "tessera/models/generation/engine.h"
#include "tessera/models/generation/load.h"
#include "tessera/parallel/parallelize_model.h"

namespace tessera::cli {
namespace {

// Whether tensor parallelism over `ranks` ranks gives each rank whole query and key-value heads.
bool divides_heads(const ModelConfig& config, int64_t ranks) {
  return config.num_key_value_heads % ranks == 0 && config.num_attention_heads % ranks == 0;
}

}  // namespace

std::shared_ptr<CausalLM> load_sharded_model(const std::string& dir, const std::string& dtype,
                                             const ModelConfig& config, at::Device device,
                                             const std::shared_ptr<comm::World>& world) {
  const int64_t ranks = world->size();
  if (ranks == 1) return load_for_generation(dir, dtype, device);
  TESSERA_CHECK(!packed_row_dtype(dtype), ErrorKind::kConfig,
                "[models.generation] --dtype {} runs on one rank, found {}. Use bfloat16, or leave out --nproc.", dtype,
                ranks);
  kernels::synchronize_kernel_choices(*world->group());
  const bool cuts = divides_heads(config, ranks);
  const auto type = c10::DeviceTypeName(device.type(), /*lower_case=*/true);
  const auto mesh = init_device_mesh(world, type, {ranks}, {cuts ? "tp" : "dp_shard"});
  const auto dtype_of_weights =
      parse_dtype_flag("models.generation", dtype).value_or(config.dtype.value_or(at::kFloat));
  auto model = make_parallel_model(config, dtype_of_weights, {.mesh = mesh});
  load_pretrained(*model, dir);
  if (world->rank() == 0) {
    log_info(
        "[models.generation] {} ranks: {}", ranks,
        cuts ? "tensor parallel" : "every layer is sharded, because the number of ranks does not divide the heads");
  }
  return model;
}

// All ranks must have KV caches of the same number of tokens, so the rank with the least memory decides. With tensor
// parallelism a rank caches only the keys and values of its own heads, so its memory is enough for more tokens.
int64_t shared_cache_tokens(CausalLM& model, int64_t requested_tokens, comm::World& world) {
  const int64_t ranks = world.size();
  const int64_t own = cache_tokens(model, requested_tokens, divides_heads(model.config(), ranks) ? ranks : 1);
  if (ranks == 1) return own;
  const auto least = at::scalar_tensor(own, at::kLong);
  comm::all_reduce(*world.group(), least, comm::ReduceOp::kMin).wait();
  return least.item<int64_t>();
}

void check_shared_cache(CausalLM& model, int64_t tokens, comm::World& world) {
  const auto weight = model.parameters().front();
  if (!weight.device().is_cpu()) return;
  const int64_t ranks = world.size();
  // load_for_generation() gives a model that computes in float32, whatever the dtype of its weights.
  const int64_t element = ranks == 1 ? sizeof(float) : weight.element_size();
  // The ranks of a host share its memory, so the pages of all local ranks must fit together. With tensor parallelism a
  // rank holds only the keys and values of its own heads: 1 / ranks of the bytes of a page.
  const int64_t page = Engine::page_bytes(model.config(), element);
  const int64_t of_rank = divides_heads(model.config(), ranks) ? page / ranks : page;
  check_cache_fits(read_available_memory(), tokens, of_rank * world.info().local_size);
}

std::shared_ptr<comm::Group> engine_group(comm::World& world) { return world.size() > 1 ? world.group() : nullptr; }

}  // namespace tessera::cli
