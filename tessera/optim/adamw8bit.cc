#include <ATen/ATen.h>

#include "tessera/comm/collectives/collectives.h"
#include "tessera/dtensor/tensor/dtensor.h"
#include "tessera/dtensor/tensor/local_tensor.h"
#include "tessera/optim/detail/adamw_update.h"
#include "tessera/optim/detail/hyperparameters.h"
#include "tessera/optim/optimizer.h"
#include "tessera/optim/quantized_moments.h"

namespace tessera::optim {
namespace {

using detail::number_of;

constexpr const char* kBits = "optim_bits";  // bitsandbytes' name
constexpr int64_t kChunkElements = int64_t{1} << 22;

Hyperparameters with_bits(Hyperparameters settings, int64_t bits) {
  detail::set_hyperparameter(settings, kBits, bits);
  return settings;
}

// The decoded float32 moments of one parameter. They exist only during an update.
struct Moments {
  tessera::ShardRegion region;
  at::Tensor average, square;                  // float32, this rank's shard
  at::Tensor largest_average, largest_square;  // one element per block
};

// Replaces the block maxima `largest` of this rank by the maxima over all ranks that hold shards of the parameter.
// COLLECTIVE over each mesh dim that shards the parameter.
void all_reduce_max(const at::Tensor& parameter, const at::Tensor& largest) {
  if (!is_dtensor(parameter)) return;
  const auto& mesh = device_mesh(parameter);
  for (int64_t dim = 0; dim < mesh->ndim(); ++dim) {
    if (!placements(parameter)[static_cast<size_t>(dim)].is_any_shard() || mesh->size(dim) == 1) continue;
    comm::all_reduce(*mesh->group(dim), largest, comm::ReduceOp::kMax, "scales of 8-bit moments").wait();
  }
}

class AdamW8bit : public Optimizer {
 public:
  AdamW8bit(nn::Module& module, const AdamW8bitOptions& options, const Hyperparameters& settings)
      : Optimizer(module, options.lr, {with_bits(settings, 8), with_bits(settings, 32)}, options.groups,
                  {options.master_weights, options.stochastic_rounding, options.seed},
                  {.kind_of =
                       [](const nn::NamedParameter& named) {
                         return size_t{is_quantized(named.slot->parameter.numel()) ? 0U : 1U};
                       },
                   .setting = kBits}),
        signed_map_(dynamic_map(true)),
        unsigned_map_(dynamic_map(false)) {
    for (const auto& [name, slot, owner] : module.named_parameters()) {
      const at::Tensor& parameter = slot->parameter;
      if (!parameter.requires_grad() || !is_quantized(parameter.numel())) continue;
      check_moment_device(local_tensor_of(parameter).device(), name);
    }
    set_up_groups("make_adamw8bit");
  }

 private:
  // Updates the parameters in chunks with equal placements. The moments of only one chunk are float32 at a time, and a
  // chunk costs one all-reduce per sharded mesh dim.
  void apply(const std::vector<ParameterUpdate>& updates, const SettingsGroup& group) override {
    const bool quantized = number_of(group.settings, kBits) == 8;
    for (size_t begin = 0; begin < updates.size();) {
      size_t end = begin;
      for (int64_t elements = 0; end < updates.size() && (end == begin || elements < kChunkElements); ++end) {
        if (end > begin && !have_equal_placements(updates[begin].entry->parameter, updates[end].entry->parameter)) {
          break;
        }
        elements += updates[end].value.numel();
      }
      const std::vector<ParameterUpdate> chunk(updates.begin() + static_cast<std::ptrdiff_t>(begin),
                                               updates.begin() + static_cast<std::ptrdiff_t>(end));
      if (quantized) {
        update_quantized(chunk, group);
      } else {
        for (const auto& update : chunk) {
          auto& state = update.entry->state;
          const auto [average, square] = apply_adamw_step(update, state.at("exp_avg").to(at::kFloat),
                                                          state.at("exp_avg_sq").to(at::kFloat), group);
          state.at("exp_avg").copy_(average);
          state.at("exp_avg_sq").copy_(square);
        }
      }
      begin = end;
    }
  }

  // Parameters of one chunk share the all-reduce of their scales, so they need the same mesh and placements.
  static bool have_equal_placements(const at::Tensor& a, const at::Tensor& b) {
    if (!is_dtensor(a) || !is_dtensor(b)) return is_dtensor(a) == is_dtensor(b);
    return *device_mesh(a) == *device_mesh(b) && placements(a) == placements(b);
  }

  // Decodes the moments, updates parameters and moments in float32, and encodes the moments again. Several ranks may
  // hold elements of one block, so the block's new scale is the maximum over the ranks, and all ranks encode with the
  // same scale.
  void update_quantized(const std::vector<ParameterUpdate>& chunk, const SettingsGroup& group) const {
    int64_t blocks = 0;
    for (const auto& update : chunk) blocks += update.entry->parameter.numel() / kMomentBlock;
    const auto largest = at::zeros({2, blocks}, at::kFloat);
    std::vector<Moments> all;
    int64_t block = 0;
    for (const auto& update : chunk) {
      const auto& state = update.entry->state;
      const int64_t own_blocks = update.entry->parameter.numel() / kMomentBlock;
      Moments moments{.region = detail::region_of(update.entry->parameter),
                      .average = {},
                      .square = {},
                      .largest_average = largest[0].narrow(0, block, own_blocks),
                      .largest_square = largest[1].narrow(0, block, own_blocks)};
      const auto before = [&](const char* codes, const char* scale, const at::Tensor& map) {
        return dequantized(state.at(codes), state.at(scale), map, moments.region);
      };
      std::tie(moments.average, moments.square) =
          apply_adamw_step(update, before("exp_avg_codes", "exp_avg_scale", signed_map_),
                           before("exp_avg_sq_codes", "exp_avg_sq_scale", unsigned_map_), group);
      add_block_maxima(moments.average, moments.region, moments.largest_average);
      add_block_maxima(moments.square, moments.region, moments.largest_square);
      all.push_back(std::move(moments));
      block += own_blocks;
    }
    all_reduce_max(chunk.front().entry->parameter, largest);
    for (size_t i = 0; i < chunk.size(); ++i) {
      const auto& state = chunk[i].entry->state;
      const auto& moments = all[i];
      quantize(moments.average, moments.largest_average, signed_map_, moments.region, state.at("exp_avg_codes"),
               state.at("exp_avg_scale"));
      quantize(moments.square, moments.largest_square, unsigned_map_, moments.region, state.at("exp_avg_sq_codes"),
               state.at("exp_avg_sq_scale"));
    }
  }

  // Updates the parameter and returns the new moments, float32. The operations are in torchao's order, so that they
  // round as torchao's do.
  static std::pair<at::Tensor, at::Tensor> apply_adamw_step(const ParameterUpdate& update, const at::Tensor& average,
                                                            const at::Tensor& square, const SettingsGroup& group) {
    const auto [beta1, beta2] = detail::pair_of(group.settings, "betas");
    const at::Tensor lr = at::scalar_tensor(group.lr, at::kFloat), gradient = update.gradient.to(at::kFloat);
    at::Tensor value = update.value.to(at::kFloat);
    // The new value, with bias corrections c1 and c2: value (1 - lr weight_decay) - lr (average / c1) / (sqrt(square) /
    // sqrt(c2) + eps).
    value = value - lr * number_of(group.settings, "weight_decay") * value;
    const at::Tensor correction1 = 1 - at::pow(at::Scalar(beta1), update.entry->step);
    const at::Tensor correction2 = 1 - at::pow(at::Scalar(beta2), update.entry->step);
    const at::Tensor new_average = average.lerp(gradient, 1 - beta1);
    const at::Tensor new_square = square.lerp(gradient.square(), 1 - beta2);
    const at::Tensor divisor = new_square.sqrt() / correction2.sqrt() + number_of(group.settings, "eps");
    update.value.copy_(value - lr * (new_average / correction1) / divisor);
    return {new_average, new_square};
  }

  void check(const Hyperparameters& settings, const char* verb) const override { detail::check_adamw(settings, verb); }

  bool communicates() const override { return true; }

  std::vector<std::string> state_names(const Hyperparameters& settings) const override {
    if (number_of(settings, kBits) != 8) return detail::adamw_states();
    return {"exp_avg_codes", "exp_avg_scale", "exp_avg_sq_codes", "exp_avg_sq_scale"};
  }

  at::Tensor signed_map_, unsigned_map_;
};

}  // namespace

std::unique_ptr<Optimizer> make_adamw8bit(nn::Module& module, const AdamW8bitOptions& options) {
  return std::make_unique<AdamW8bit>(module, options, detail::adamw_settings(options));
}

}  // namespace tessera::optim
