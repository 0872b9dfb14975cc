// Samples for the attention operations of the CUDA back-ends. Without a device their sharding is planned, not run.
#include <array>

#include "tests/conformance/samples.h"

namespace tessera::testing {

namespace {

constexpr int64_t kHeads = 4;
constexpr int64_t kLength = 8;
constexpr int64_t kWidth = 8;

at::Tensor heads(SampleMaker& make) { return make.normal({make.n, kHeads, kLength, kWidth}).to(at::kHalf); }

NamedArguments inputs(SampleMaker& make) {
  return {{"query", heads(make)}, {"key", heads(make)}, {"value", heads(make)}};
}

NamedArguments saved(SampleMaker& make, const char* grad) {
  NamedArguments arguments = inputs(make);
  arguments.emplace_back(grad, heads(make));
  arguments.emplace_back("out", heads(make));
  arguments.emplace_back("logsumexp", make.normal({make.n, kHeads, kLength}).to(at::kFloat));
  arguments.emplace_back("philox_seed", at::zeros({}, at::kLong));
  arguments.emplace_back("philox_offset", at::zeros({}, at::kLong));
  arguments.emplace_back("dropout_p", 0.0);
  arguments.emplace_back("is_causal", true);
  return arguments;
}

void plan(SampleMaker& make, const NamedArguments& arguments) {
  if (make.n > 0) {
    Sample& sample = make.add(arguments);
    sample.plan_only = true;
    sample.whole = {"philox_seed", "philox_offset"};
  }
}

}  // namespace

void add_attention_samples(SampleTable& table) {
  table.add("aten::_scaled_dot_product_flash_attention", [](SampleMaker& make) { plan(make, inputs(make)); });
  table.add({"aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention"},
            [](SampleMaker& make) {
              NamedArguments arguments = inputs(make);
              arguments.emplace_back("compute_log_sumexp", true);
              plan(make, arguments);
            });
  table.add(
      {"aten::_scaled_dot_product_flash_attention_backward", "aten::_scaled_dot_product_cudnn_attention_backward"},
      [](SampleMaker& make) {
        NamedArguments arguments = saved(make, "grad_out");
        for (const char* name : {"cum_seq_q", "cum_seq_k", "attn_bias"}) {
          if (make.has(name)) arguments.emplace_back(name, at::Tensor());
        }
        arguments.emplace_back("max_q", kLength);
        arguments.emplace_back("max_k", kLength);
        plan(make, arguments);
      });
  table.add("aten::_scaled_dot_product_efficient_attention_backward", [](SampleMaker& make) {
    NamedArguments arguments = saved(make, "grad_out_");
    arguments.emplace_back("attn_bias", at::Tensor());
    arguments.emplace_back("grad_input_mask", c10::List<bool>({true, true, true, false}));
    plan(make, arguments);
  });
}

}  // namespace tessera::testing
