// Sharding rules of pooling, resampling and rearranging of images. Batch and channel dims may be sharded; spatial dims
// must not be.
#include "tessera/base/error.h"
#include "tessera/dtensor/rules/table.h"

namespace tessera {

namespace {

// Returns the number of dims before the `rank` spatial dims of the first input: 2 with a batch dim (batch, channels),
// else 1.
int64_t outer_dims(const OpCall& call, int64_t rank) { return call.inputs[0].dim() - rank; }

// Proposes for each batch or channel dim a shard of this dim in all inputs and outputs. For an operation without a meta
// kernel the caller must set proposal.outputs.
void propose_alike(const OpCall& call, Proposal& proposal, int64_t rank) {
  for (int64_t dim = 0; dim < outer_dims(call, rank); ++dim) {
    proposal.strategies.push_back(same_placement(call, Shard(dim)));
  }
  proposal.supports_empty_shards = false;
}

void propose_pool(const OpCall& call, Proposal& proposal, int64_t rank) {
  propose_alike(call, proposal, rank);
  proposal.allows_new_shards = true;
}

Rule pool(int64_t rank) {
  return [rank](const OpCall& call, Proposal& proposal) { propose_pool(call, proposal, rank); };
}

std::vector<int64_t> with_space(const OpCall& call, int64_t rank, const std::vector<int64_t>& space) {
  std::vector<int64_t> sizes = call.inputs[0].sizes.vec();
  for (int64_t i = 0; i < rank; ++i) sizes[sizes.size() - rank + i] = at_or_single(space, i);
  return sizes;
}

// Average pooling is linear, so a Partial(sum) input gives a Partial(sum) result.
Rule average_pool(int64_t rank) {
  return [rank](const OpCall& call, Proposal& proposal) {
    propose_pool(call, proposal, rank);
    add_linear(call, proposal, 0);
  };
}

// _adaptive_avg_pool2d(self, output_size)
Rule adaptive_average_pool(int64_t rank) {
  return [rank, average = average_pool(rank)](const OpCall& call, Proposal& proposal) {
    average(call, proposal);
    proposal.output(with_space(call, rank, call.ints_at(1)));
  };
}

// Returns the output size of a pooled dim, as ATen's pooling_output_shape does.
int64_t pooled(int64_t n, int64_t kernel, int64_t stride, int64_t pad, int64_t dilation, bool ceil) {
  const int64_t span = n + 2 * pad - dilation * (kernel - 1) - 1 + (ceil ? stride - 1 : 0);
  int64_t size = (span >= 0 ? span / stride : -1) + 1;
  if (ceil && (size - 1) * stride >= n + pad) --size;
  return size;
}

// max_pool3d_with_indices(self, kernel_size, stride, padding, dilation, ceil_mode)
void propose_max_pool3d(const OpCall& call, Proposal& proposal) {
  propose_pool(call, proposal, 3);
  const auto kernel = call.ints_at(1);
  const auto stride = call.ints_at(2).empty() ? kernel : call.ints_at(2);
  const auto pad = call.ints_at(3);
  const auto dilation = call.ints_at(4);
  std::vector<int64_t> space;
  const auto& sizes = call.inputs[0].sizes;
  for (int64_t i = 0; i < 3; ++i) {
    space.push_back(pooled(sizes[sizes.size() - 3 + i], at_or_single(kernel, i), at_or_single(stride, i),
                           at_or_single(pad, i), at_or_single(dilation, i), call.bool_at(5)));
  }
  proposal.outputs.assign(2, OutputShape{with_space(call, 3, space), {}});
}

// fractional_max_pool2d(self, kernel_size, output_size, random_samples [N, C, 2])
Rule fractional_max_pool(int64_t rank) {
  return [rank](const OpCall& call, Proposal& proposal) {
    const int64_t outer = outer_dims(call, rank);
    for (int64_t dim = 0; dim < outer; ++dim) {
      proposal.strategies.push_back({{Shard(dim)}, {Shard(dim), Shard(outer == 2 ? dim : 1)}});
    }
    proposal.supports_empty_shards = false;
    proposal.allows_new_shards = true;
    proposal.outputs.assign(2, OutputShape{with_space(call, rank, call.ints_at(2)), {}});
  };
}

// max_unpool2d(self, indices, output_size)
Rule max_unpool(int64_t rank) {
  return [rank](const OpCall& call, Proposal& proposal) {
    propose_alike(call, proposal, rank);
    proposal.output(with_space(call, rank, call.ints_at(2)));
  };
}

// Backward of pooling, (grad, self, ..., indices): linear in the gradient; the result has the shape of self.
Rule pool_backward(int64_t rank) {
  return [rank](const OpCall& call, Proposal& proposal) {
    propose_alike(call, proposal, rank);
    add_linear(call, proposal, 0);
    proposal.output(call.inputs[1].sizes);
  };
}

// upsample_bilinear2d(self, output_size, ...)
void propose_upsample(const OpCall& call, Proposal& proposal) {
  const auto space = call.ints_at(1);
  const auto rank = static_cast<int64_t>(space.size());
  propose_alike(call, proposal, rank);
  add_linear(call, proposal, 0);
  proposal.output(with_space(call, rank, space));
}

// upsample_bilinear2d_backward(grad, output_size, input_size, ...). The argument input_size is the global size and is
// replaced by the local size.
void propose_upsample_backward(const OpCall& call, Proposal& proposal) {
  propose_alike(call, proposal, static_cast<int64_t>(call.ints_at(1).size()));
  add_linear(call, proposal, 0);
  proposal.output(call.ints_at(2));
  proposal.rewrite = with_local_sizes(2);
}

// grid_sampler_2d(input [N, C, ...], grid [N, ..., 2]): linear in the input. The grid has no channel dim, so it is
// replicated if channels are sharded.
Rule grid_sampler(int64_t rank) {
  return [rank](const OpCall& call, Proposal& proposal) {
    proposal.strategies = {{{Shard(0)}, {Shard(0), Shard(0)}}, {{Shard(1)}, {Shard(1), Replicate()}}};
    add_linear(call, proposal, 0);
    proposal.supports_empty_shards = false;
    const auto& grid = call.inputs[1].sizes;
    TESSERA_CHECK(call.inputs[0].dim() == rank + 2 && call.inputs[1].dim() == rank + 2, ErrorKind::kShape,
                  "[dtensor.dispatch] {}: found {} dims of the input and {} of the grid, wanted {} dims of both.",
                  call.describe(), call.inputs[0].dim(), call.inputs[1].dim(), rank + 2);
    proposal.output(with_space(call, rank, {grid.begin() + 1, grid.end() - 1}));
  };
}

// Backward of grid_sampler: (grad, input, grid, ...) -> gradients of input and grid
void propose_grid_sampler_backward(const OpCall& call, Proposal& proposal) {
  proposal.strategies = {{{Shard(0), Shard(0)}, {Shard(0), Shard(0), Shard(0)}},
                         {{Shard(1), Partial()}, {Shard(1), Shard(1), Replicate()}}};
  proposal.supports_empty_shards = false;
  proposal.output(call.inputs[1].sizes);
  proposal.output(call.inputs[2].sizes);
}

// pixel_shuffle(self [..., C r^2, H, W], r) only moves values, so an input with any Partial placement gives a result
// with this placement. `apart`: true for pixel_shuffle, false for pixel_unshuffle.
Rule pixel_shuffle(bool apart) {
  return [apart](const OpCall& call, Proposal& proposal) {
    propose_alike(call, proposal, 3);
    for (const Placement& p : partials_among(call)) proposal.strategies.push_back(same_placement(call, p));
    const int64_t factor = call.int_at(1);
    std::vector<int64_t> sizes = call.inputs[0].sizes.vec();
    const size_t channels = sizes.size() - 3;
    TESSERA_CHECK(sizes.size() >= 3 && factor > 0, ErrorKind::kShape,
                  "[dtensor.dispatch] {}: found {} dims and factor {}, wanted at least 3 dims and a positive factor.",
                  call.describe(), sizes.size(), factor);
    sizes[channels] = apart ? sizes[channels] / (factor * factor) : sizes[channels] * factor * factor;
    for (size_t i = channels + 1; i < sizes.size(); ++i) sizes[i] = apart ? sizes[i] * factor : sizes[i] / factor;
    proposal.output(sizes);
  };
}

// channel_shuffle(self [N, C, ...], groups) moves values between channels, so every dim but the channels may be
// sharded.
void propose_channel_shuffle(const OpCall& call, Proposal& proposal) {
  for (int64_t dim = 0; dim < call.inputs[0].dim(); ++dim) {
    if (dim != 1) proposal.strategies.push_back({{Shard(dim)}, {Shard(dim)}});
  }
  add_pass_through(call, proposal, 0, passes_all);
  proposal.supports_empty_shards = false;
  proposal.output(call.inputs[0].sizes);
}

// im2col and col2im: the batch dim, if there is one, may be sharded. `batched_dims` is the number of dims of an input
// with a batch dim.
Rule columns(int64_t batched_dims) {
  return [batched_dims](const OpCall& call, Proposal& proposal) {
    if (call.inputs[0].dim() == batched_dims) proposal.strategies.push_back({{Shard(0)}, {Shard(0)}});
    add_linear(call, proposal, 0);
    proposal.supports_empty_shards = false;
    const auto pick = [&](int arg, size_t i) { return at_or_single(call.ints_at(arg), i); };
    const auto& sizes = call.inputs[0].sizes;
    std::vector<int64_t> result(sizes.begin(), sizes.end() - (batched_dims - 1));
    const int shift = batched_dims == 3 ? 1 : 0;  // col2im(self, output_size, kernel_size, ...)
    const int64_t kernel = pick(1 + shift, 0) * pick(1 + shift, 1);
    if (shift == 1) {
      result.push_back(sizes[sizes.size() - 2] / kernel);
      result.push_back(pick(1, 0));
      result.push_back(pick(1, 1));
    } else {  // im2col(self, kernel_size, dilation, padding, stride)
      result.push_back(sizes[sizes.size() - 3] * kernel);
      result.push_back(pooled(sizes[sizes.size() - 2], pick(1, 0), pick(4, 0), pick(3, 0), pick(2, 0), false) *
                       pooled(sizes[sizes.size() - 1], pick(1, 1), pick(4, 1), pick(3, 1), pick(2, 1), false));
    }
    proposal.output(result);
  };
}

void add_pool_rules(RuleTable& table) {
  table.add("aten::avg_pool2d", average_pool(2));
  table.add("aten::avg_pool3d", average_pool(3));
  table.add("aten::_adaptive_avg_pool2d", adaptive_average_pool(2));
  table.add("aten::_adaptive_avg_pool3d", adaptive_average_pool(3));
  table.add({"aten::max_pool2d_with_indices", "aten::adaptive_max_pool2d"}, pool(2));
  table.add("aten::adaptive_max_pool3d", pool(3));
  table.add("aten::max_pool3d_with_indices", propose_max_pool3d);
  table.add("aten::fractional_max_pool2d", fractional_max_pool(2));
  table.add("aten::fractional_max_pool3d", fractional_max_pool(3));
  table.add("aten::max_unpool2d", max_unpool(2));
  table.add("aten::max_unpool3d", max_unpool(3));
  table.add(
      {"aten::avg_pool2d_backward", "aten::_adaptive_avg_pool2d_backward", "aten::max_pool2d_with_indices_backward",
       "aten::adaptive_max_pool2d_backward", "aten::fractional_max_pool2d_backward"},
      pool_backward(2));
  table.add(
      {"aten::avg_pool3d_backward", "aten::_adaptive_avg_pool3d_backward", "aten::max_pool3d_with_indices_backward",
       "aten::adaptive_max_pool3d_backward", "aten::fractional_max_pool3d_backward"},
      pool_backward(3));
}

}  // namespace

void add_spatial_rules(RuleTable& table) {
  add_pool_rules(table);
  table.add(
      {"aten::upsample_nearest1d", "aten::upsample_nearest2d", "aten::upsample_nearest3d",
       "aten::_upsample_nearest_exact1d", "aten::_upsample_nearest_exact2d", "aten::_upsample_nearest_exact3d",
       "aten::upsample_linear1d", "aten::upsample_bilinear2d", "aten::upsample_trilinear3d", "aten::upsample_bicubic2d",
       "aten::_upsample_bilinear2d_aa", "aten::_upsample_bicubic2d_aa", "aten::_upsample_lanczos2d_aa"},
      propose_upsample);
  table.add(
      {"aten::upsample_nearest1d_backward", "aten::upsample_nearest2d_backward", "aten::upsample_nearest3d_backward",
       "aten::_upsample_nearest_exact1d_backward", "aten::_upsample_nearest_exact2d_backward",
       "aten::_upsample_nearest_exact3d_backward", "aten::upsample_linear1d_backward",
       "aten::upsample_bilinear2d_backward", "aten::upsample_trilinear3d_backward", "aten::upsample_bicubic2d_backward",
       "aten::_upsample_bilinear2d_aa_backward", "aten::_upsample_bicubic2d_aa_backward",
       "aten::_upsample_lanczos2d_aa_backward"},
      propose_upsample_backward);
  table.add("aten::grid_sampler_2d", grid_sampler(2));
  table.add("aten::grid_sampler_3d", grid_sampler(3));
  table.add({"aten::grid_sampler_2d_backward", "aten::grid_sampler_3d_backward"}, propose_grid_sampler_backward);
  table.add("aten::pixel_shuffle", pixel_shuffle(true));
  table.add("aten::pixel_unshuffle", pixel_shuffle(false));
  table.add({"aten::channel_shuffle", "aten::native_channel_shuffle"}, propose_channel_shuffle);
  table.add("aten::im2col", columns(4));
  table.add("aten::col2im", columns(3));
}

}  // namespace tessera
