// Samples for batch, layer, group and other normalisations.
#include "tests/conformance/samples.h"

namespace tessera::testing {

namespace {

using Ints = std::vector<int64_t>;
constexpr double kEps = 1e-5;

// Images [n, 4, 3], with weights and statistics of 4 channels.
NamedArguments channels(SampleMaker& make, bool statistics) {
  NamedArguments arguments{{"input", make.normal({make.n, 4, make.k})},
                           {"weight", make.uniform(0.5, 1.5, {4})},
                           {"bias", make.normal({4})},
                           {"momentum", 0.1},
                           {"eps", kEps}};
  if (statistics) {
    arguments.emplace_back("running_mean", make.normal({4}));
    arguments.emplace_back("running_var", make.uniform(0.5, 1.5, {4}));
  }
  return arguments;
}

void add_batch_norm(SampleMaker& make, const NamedArguments& arguments) {
  Sample& sample = make.add(arguments);
  sample.flowing = 1;
  sample.may_refuse = make.has("running_mean");  // some write to it, although their schema does not say so
}

void make_batch_norm(SampleMaker& make) {
  if (make.n == 0) return;
  const bool statistics = make.has("running_mean");
  if (!make.has("training")) {
    add_batch_norm(make, channels(make, statistics));
    return;
  }
  for (const bool training : {true, false}) {
    if (training || statistics) {
      NamedArguments arguments = channels(make, statistics);
      arguments.emplace_back("training", training);
      add_batch_norm(make, arguments);
    }
  }
}

void add_layer_norms(SampleTable& table) {
  table.add("aten::native_layer_norm", [](SampleMaker& make) {
    make.add({{"input", make.normal({make.n, make.k, make.m})},
              {"normalized_shape", Ints{make.m}},
              {"weight", make.uniform(0.5, 1.5, {make.m})},
              {"bias", make.normal({make.m})},
              {"eps", kEps}})
        .flowing = 1;
    make.add({{"input", make.normal({make.n, make.k, make.m})},
              {"normalized_shape", Ints{make.k, make.m}},
              {"eps", kEps}})
        .flowing = 1;
  });
  table.add("aten::native_layer_norm_backward", [](SampleMaker& make) {
    const at::Tensor input = make.normal({make.n, make.k, make.m});
    const at::Tensor weight = make.uniform(0.5, 1.5, {make.m});
    const at::Tensor bias = make.normal({make.m});
    const auto [out, mean, rstd] = at::native_layer_norm(input, {make.m}, weight, bias, kEps);
    make.add({{"grad_out", make.normal({make.n, make.k, make.m})},
              {"input", input},
              {"normalized_shape", Ints{make.m}},
              {"mean", mean},
              {"rstd", rstd},
              {"weight", weight},
              {"bias", bias},
              {"output_mask", c10::List<bool>({true, true, true})}});
  });
  table.add("aten::_fused_rms_norm", [](SampleMaker& make) {
    make.add({{"input", make.normal({make.n, make.k, make.m})},
              {"normalized_shape", Ints{make.m}},
              {"weight", make.uniform(0.5, 1.5, {make.m})},
              {"eps", kEps}});
  });
  table.add("aten::_fused_rms_norm_backward", [](SampleMaker& make) {
    const at::Tensor input = make.normal({make.n, make.k, make.m});
    const at::Tensor rstd = (input.pow(2).mean(-1, true) + kEps).rsqrt();
    make.add({{"grad_out", make.normal({make.n, make.k, make.m})},
              {"input", input},
              {"normalized_shape", Ints{make.m}},
              {"rstd", rstd},
              {"weight", make.uniform(0.5, 1.5, {make.m})},
              {"output_mask", c10::List<bool>({true, true})}})
        .plan_only = true;
  });
  table.add("aten::native_group_norm", [](SampleMaker& make) {
    make.add({{"input", make.normal({make.n, 4, make.k})},
              {"weight", make.uniform(0.5, 1.5, {4})},
              {"bias", make.normal({4})},
              {"N", make.n},
              {"C", 4},
              {"HxW", make.k},
              {"group", 2},
              {"eps", kEps}})
        .flowing = 1;
  });
}

}  // namespace

void add_norm_layer_samples(SampleTable& table) {
  add_layer_norms(table);
  table.add({"aten::native_batch_norm", "aten::_native_batch_norm_legit", "aten::_native_batch_norm_legit_functional",
             "aten::_native_batch_norm_legit_no_training", "aten::_batch_norm_with_update",
             "aten::_batch_norm_with_update_functional"},
            make_batch_norm);
  table.add("aten::native_batch_norm_backward", [](SampleMaker& make) {
    if (make.n == 0) return;
    const at::Tensor input = make.normal({make.n, 4, make.k});
    const at::Tensor weight = make.uniform(0.5, 1.5, {4});
    const auto [out, mean, invstd] = at::native_batch_norm(input, weight, make.normal({4}), {}, {}, true, 0.1, kEps);
    make.add({{"grad_out", make.normal({make.n, 4, make.k})},
              {"input", input},
              {"weight", weight},
              {"save_mean", mean},
              {"save_invstd", invstd},
              {"train", true},
              {"eps", kEps},
              {"output_mask", c10::List<bool>({true, true, true})}});
  });
}

}  // namespace tessera::testing
