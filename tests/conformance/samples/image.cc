// Samples for convolution, pooling and resampling: batches of n images with 4 channels.
#include <array>

#include "tests/conformance/samples.h"

namespace tessera::testing {

namespace {

using Ints = std::vector<int64_t>;

// Returns [n, 4, 6, 6, ...] with the given number of spatial dims.
Ints image_shape(int64_t n, int64_t spatial, int64_t size) {
  Ints shape{n, 4};
  shape.insert(shape.end(), spatial, size);
  return shape;
}

Ints each(int64_t spatial, int64_t size) { return Ints(spatial, size); }

// Returns the number in a name like "avg_pool2d" or "upsample_nearest3d_backward".
int64_t spatial_dims(const std::string& name) {
  for (const char digit : {'1', '2', '3'}) {
    if (name.find(std::string(1, digit) + "d") != std::string::npos) return digit - '0';
  }
  throw std::runtime_error(name + " does not say its dims");
}

void make_upsample(SampleMaker& make) {
  const std::string& name = make.schema().name();
  const int64_t spatial = spatial_dims(name);
  NamedArguments arguments{{"output_size", each(spatial, 6)}};
  if (make.has("align_corners")) arguments.emplace_back("align_corners", false);
  if (make.has("grad_output")) {
    arguments.emplace_back("grad_output", make.normal(image_shape(make.n, spatial, 6)));
    arguments.emplace_back("input_size", image_shape(make.n, spatial, 4));
  } else {
    arguments.emplace_back("self", make.normal(image_shape(make.n, spatial, 4)));
  }
  if (make.n > 0) make.add(arguments);
}

void make_pool(SampleMaker& make) {
  const int64_t spatial = spatial_dims(make.schema().name());
  if (make.n > 0) {
    make.add({{"self", make.distinct(image_shape(make.n, spatial, 4))},
              {"kernel_size", each(spatial, 2)},
              {"stride", each(spatial, 2)}});
    make.add({{"self", make.distinct(image_shape(make.n, spatial, 4))},
              {"kernel_size", each(spatial, 3)},
              {"stride", each(spatial, 1)},
              {"padding", each(spatial, 1)}});
  }
}

void make_adaptive_pool(SampleMaker& make) {
  const int64_t spatial = spatial_dims(make.schema().name());
  if (make.n > 0) {
    make.add({{"self", make.distinct(image_shape(make.n, spatial, 4))}, {"output_size", each(spatial, 2)}});
  }
}

void add_pools(SampleTable& table) {
  table.add({"aten::avg_pool1d", "aten::avg_pool2d", "aten::avg_pool3d", "aten::max_pool1d_with_indices",
             "aten::max_pool2d_with_indices", "aten::max_pool3d_with_indices"},
            make_pool);
  table.add({"aten::_adaptive_avg_pool2d", "aten::_adaptive_avg_pool3d", "aten::adaptive_avg_pool1d",
             "aten::adaptive_max_pool1d", "aten::adaptive_max_pool2d", "aten::adaptive_max_pool3d"},
            make_adaptive_pool);
  table.add("aten::_adaptive_avg_pool2d_backward", [](SampleMaker& make) {
    if (make.n > 0) {
      make.add({{"grad_output", make.normal({make.n, 4, 2, 2})}, {"self", make.normal({make.n, 4, 4, 4})}});
    }
  });
  table.add("aten::max_pool2d_with_indices_backward", [](SampleMaker& make) {
    if (make.n > 0) {
      const at::Tensor image = make.distinct({make.n, 4, 4, 4});
      const auto [values, indices] = at::max_pool2d_with_indices(image, {2, 2}, {2, 2});
      make.add({{"grad_output", make.normal({make.n, 4, 2, 2})},
                {"self", image},
                {"kernel_size", Ints{2, 2}},
                {"stride", Ints{2, 2}},
                {"padding", Ints{0, 0}},
                {"dilation", Ints{1, 1}},
                {"ceil_mode", false},
                {"indices", indices}});
    }
  });
  table.add({"aten::max_unpool2d", "aten::max_unpool3d"}, [](SampleMaker& make) {
    const int64_t spatial = spatial_dims(make.schema().name());
    if (make.n > 0) {
      const at::Tensor image = make.distinct(image_shape(make.n, spatial, 4));
      const auto pooled =
          spatial == 2 ? at::max_pool2d_with_indices(image, {2, 2}) : at::max_pool3d_with_indices(image, {2, 2, 2});
      NamedArguments arguments{
          {"self", std::get<0>(pooled)}, {"indices", std::get<1>(pooled)}, {"output_size", each(spatial, 4)}};
      if (spatial == 3) {
        arguments.emplace_back("stride", each(3, 2));
        arguments.emplace_back("padding", each(3, 0));
      }
      make.add(arguments);
    }
  });
  table.add({"aten::fractional_max_pool2d", "aten::fractional_max_pool3d"}, [](SampleMaker& make) {
    const int64_t spatial = spatial_dims(make.schema().name());
    if (make.n > 0) {
      make.add({{"self", make.distinct(image_shape(make.n, spatial, 6))},
                {"kernel_size", each(spatial, 2)},
                {"output_size", each(spatial, 2)},
                {"random_samples", make.uniform(0, 1, {make.n, 4, spatial})}});
    }
  });
}

void add_grid_samplers(SampleTable& table) {
  table.add({"aten::grid_sampler_2d", "aten::grid_sampler_3d", "aten::grid_sampler_2d_backward",
             "aten::grid_sampler_3d_backward"},
            [](SampleMaker& make) {
              const int64_t spatial = spatial_dims(make.schema().name());
              Ints grid{make.n};
              grid.insert(grid.end(), spatial, 3);
              grid.push_back(spatial);
              NamedArguments arguments{{"input", make.normal(image_shape(make.n, spatial, 4))},
                                       {"grid", make.uniform(-0.8, 0.8, grid)},
                                       {"interpolation_mode", 0},
                                       {"padding_mode", 0},
                                       {"align_corners", false}};
              if (make.has("grad_output")) {
                arguments.emplace_back("grad_output", make.normal(image_shape(make.n, spatial, 3)));
                arguments.emplace_back("output_mask", c10::List<bool>({true, true}));
              }
              if (make.n > 0) {
                make.add(arguments).gradient = !make.has("grad_output");  // its views may refuse
              }
            });
}

void add_convolutions(SampleTable& table) {
  const auto shared = [](int64_t stride, int64_t padding, int64_t groups) {
    return NamedArguments{{"stride", each(2, stride)}, {"padding", each(2, padding)},  {"dilation", each(2, 1)},
                          {"transposed", false},       {"output_padding", each(2, 0)}, {"groups", groups}};
  };
  table.add("aten::convolution", [=](SampleMaker& make) {
    if (make.n == 0) return;
    for (const int64_t groups : {1, 2}) {
      NamedArguments arguments = shared(1, 1, groups);
      arguments.emplace_back("input", make.normal({make.n, 4, 6, 6}));
      arguments.emplace_back("weight", make.normal({8, 4 / groups, 3, 3}));
      arguments.emplace_back("bias", make.normal({8}));
      make.add(arguments);
    }
    NamedArguments patches = shared(2, 0, 1);
    patches.emplace_back("input", make.normal({make.n, 3, 8, 8}));
    patches.emplace_back("weight", make.normal({8, 3, 2, 2}));
    make.add(patches);
  });
  table.add("aten::convolution_backward", [=](SampleMaker& make) {
    if (make.n == 0) return;
    NamedArguments arguments = shared(1, 1, 1);
    arguments.emplace_back("grad_output", make.normal({make.n, 8, 6, 6}));
    arguments.emplace_back("input", make.normal({make.n, 4, 6, 6}));
    arguments.emplace_back("weight", make.normal({8, 4, 3, 3}));
    arguments.emplace_back("bias_sizes", Ints{8});
    arguments.emplace_back("output_mask", c10::List<bool>({true, true, true}));
    make.add(arguments);
  });
}

}  // namespace

void add_image_samples(SampleTable& table) {
  add_pools(table);
  add_grid_samplers(table);
  add_convolutions(table);
  for (const auto& op : listed_ops()) {
    if (op.group == "upsample") table.add(op.name, make_upsample);
  }
}

}  // namespace tessera::testing
