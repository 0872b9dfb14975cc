#include <ATen/Parallel.h>

#include <cmath>
#include <numbers>

#include "tessera/base/philox.h"
#include "tessera/models/files/weights.h"
#include "tessera/models/tensors/model_parameters.h"
#include "tessera/nn/linear/quantized_linear.h"

namespace tessera {
namespace {

// Returns two independent standard normal numbers (Box-Muller) for the elements 2 * block and 2 * block + 1.
std::array<double, 2> normal_pair(uint64_t seed, uint64_t stream, uint64_t block) {
  const auto words = philox(seed, block, stream);
  const double radius = std::sqrt(-2.0 * std::log(philox_uniform(words)));
  const double angle = 2.0 * std::numbers::pi * philox_uniform({words[2], words[3], 0, 0});
  return {radius * std::cos(angle), radius * std::sin(angle)};
}

// Fills one row of the last dim. `first` is the global index of the row's first element. normal_pair() makes the
// numbers of elements 2 i and 2 i + 1 together, so an odd `first` starts with the second number of a pair.
void fill_row(float* row, int64_t width, int64_t first, uint64_t seed, uint64_t stream, double deviation) {
  for (int64_t i = 0; i < width;) {
    const int64_t index = first + i;
    const auto pair = normal_pair(seed, stream, static_cast<uint64_t>(index) / 2);
    row[i++] = static_cast<float>(pair[static_cast<size_t>(index % 2)] * deviation);
    if (index % 2 == 0 && i < width) row[i++] = static_cast<float>(pair[1] * deviation);
  }
}

// Returns the values of this rank's shard (`box` of the tensor of shape `whole`). They depend only on global indices,
// so an element gets the same value under every sharding.
at::Tensor normal_box(const LocalBox& box, const std::vector<int64_t>& whole, uint64_t seed, uint64_t stream,
                      double deviation) {
  auto values = at::empty(box.shape, at::kFloat);
  if (values.numel() == 0) return values;
  const int64_t width = box.shape.back(), rows = values.numel() / width;
  auto* data = values.mutable_data_ptr<float>();
  at::parallel_for(0, rows, 64, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      // `first` is the global row-major index of the row's first element, computed from the box's offset dim by dim.
      int64_t first = box.offset.back(), remaining = row, stride = whole.back();
      for (size_t dim = box.shape.size() - 1; dim-- > 0;) {
        first += (box.offset[dim] + remaining % box.shape[dim]) * stride;
        remaining /= box.shape[dim];
        stride *= whole[dim];
      }
      fill_row(data + row * width, width, first, seed, stream, deviation);
    }
  });
  return values;
}

}  // namespace

void init_weights(CausalLM& model, uint64_t seed, c10::Device device) {
  at::NoGradGuard no_grad;
  for (auto& parameter : shared_parameters(model)) {
    const auto& name = parameter.names.front();
    const auto box = local_shard_box(parameter.tensor);
    const auto whole = parameter.tensor.sizes().vec();
    const auto local = writable_local_shard(parameter, device);
    if (whole.size() >= 2) {
      local.copy_(normal_box(box, whole, seed, philox_stream(name), model.config().initializer_range));
    } else {
      local.fill_(parameter.slots.front()->initial);
    }
  }
  // For a packed weight, the values of the unsharded weight are computed and then packed.
  for (const auto& [name, packed] : nn::packed_weights(model)) {
    const std::vector<int64_t> whole = {packed->out, packed->in};
    packed->pack(normal_box({whole, {0, 0}}, whole, seed, philox_stream(name), model.config().initializer_range));
  }
}

}  // namespace tessera
