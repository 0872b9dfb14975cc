// Samples for the losses.
#include "tests/conformance/samples.h"

namespace tessera::testing {

namespace {

constexpr int64_t kIgnored = -100;

// Returns classes [n], or [n, 2, 3] for images. The second target is the ignored index.
at::Tensor targets(SampleMaker& make, bool image) {
  const at::Tensor all = image ? make.integers(0, make.m, {make.n, 2, make.k}) : make.integers(0, make.m, {make.n});
  if (all.numel() > 1) all.view({-1})[1] = kIgnored;
  return all;
}

void make_nll(SampleMaker& make) {
  const bool image = make.schema().name().find("2d") != std::string::npos;
  const bool backward = make.has("grad_output");
  for (const int64_t reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum}) {
    if (make.n == 0 && reduction == at::Reduction::Mean) continue;
    for (const bool weighted : {false, true}) {
      const at::Tensor input = image ? make.normal({make.n, make.m, 2, make.k}) : make.normal({make.n, make.m});
      const at::Tensor target = targets(make, image);
      const at::Tensor weight = weighted ? make.uniform(0.5, 1.5, {make.m}) : at::Tensor();
      NamedArguments arguments{
          {"self", input}, {"target", target}, {"reduction", reduction}, {"ignore_index", kIgnored}};
      if (weighted) arguments.emplace_back("weight", weight);
      if (backward) {
        const auto forward = image ? at::nll_loss2d_forward(input, target, weight, reduction, kIgnored)
                                   : at::nll_loss_forward(input, target, weight, reduction, kIgnored);
        arguments.emplace_back("grad_output", make.normal(std::get<0>(forward).sizes()));
        arguments.emplace_back("total_weight", std::get<1>(forward));
      }
      make.add(arguments);
    }
  }
}

void make_softmax_backward(SampleMaker& make) {
  const bool log = make.schema().name().find("log") != std::string::npos;
  for (const int64_t dim : {1, 0}) {
    const at::Tensor input = make.normal({make.n, make.m});
    make.add({{"grad_output", make.normal({make.n, make.m})},
              {"output", log ? at::log_softmax(input, dim) : at::softmax(input, dim)},
              {"dim", dim},
              {"input_dtype", at::kDouble}});
  }
}

void make_softmax(SampleMaker& make) {
  for (const int64_t dim : {1, 0}) {
    NamedArguments arguments{{"self", make.normal({make.n, make.m})}, {"dim", dim}};
    if (make.has("half_to_float")) arguments.emplace_back("half_to_float", false);
    make.add(arguments);
  }
}

}  // namespace

void add_loss_samples(SampleTable& table) {
  table.add(
      {"aten::nll_loss_forward", "aten::nll_loss_backward", "aten::nll_loss2d_forward", "aten::nll_loss2d_backward"},
      make_nll);
  table.add({"aten::_softmax", "aten::_log_softmax", "aten::_safe_softmax"}, make_softmax);
  table.add({"aten::_softmax_backward_data", "aten::_log_softmax_backward_data"}, make_softmax_backward);
}

}  // namespace tessera::testing
