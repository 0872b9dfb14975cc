// Samples for operations that draw numbers. tests/dtensor/random_dist_test.cc checks the distribution of the numbers.
#include "tests/conformance/samples.h"

namespace tessera::testing {

namespace {

void drawn_like(SampleMaker& make) {
  NamedArguments arguments{{"self", make.uniform(0.1, 0.9, {make.n, make.m})}};
  if (make.has("high")) arguments.emplace_back("high", 9);
  if (make.has("low")) arguments.emplace_back("low", 2);
  if (make.has("p") && make.schema().name() != "aten::bernoulli") arguments.emplace_back("p", 0.4);
  make.add(arguments).random = true;
}

}  // namespace

void add_random_samples(SampleTable& table) {
  table.add({"aten::rand_like", "aten::randn_like", "aten::randint_like", "aten::bernoulli", "aten::exponential",
             "aten::geometric", "aten::log_normal", "aten::normal", "aten::normal_functional", "aten::uniform"},
            drawn_like);
  table.add("aten::bernoulli_.float", drawn_like);
  table.add("aten::bernoulli.float", drawn_like);
  table.add("aten::multinomial", [](SampleMaker& make) {
    if (make.n > 0) {
      make.add({{"self", make.uniform(0.1, 0.9, {make.n, make.m})}, {"num_samples", 3}, {"replacement", true}}).random =
          true;
    }
  });
  table.add("aten::native_dropout", [](SampleMaker& make) {
    if (make.n == 0) {  // with no rows the plain mask has the input's type, else Bool
      return;
    }
    make.add({{"input", make.normal({make.n, make.m})}, {"p", 0.4}, {"train", true}}).random = true;
    make.add({{"input", make.normal({make.n, make.m})}, {"p", 0.4}, {"train", false}});
  });
  table.add("aten::native_dropout_backward", [](SampleMaker& make) {
    make.add({{"grad_output", make.normal({make.n, make.m})}, {"mask", make.flags({make.n, make.m})}, {"scale", 1.25}});
  });
  table.add({"aten::rrelu_with_noise", "aten::rrelu_with_noise_functional"}, [](SampleMaker& make) {
    const NamedArguments arguments{{"self", make.normal({make.n, make.m})},
                                   {"noise", at::zeros({make.n, make.m}, at::kDouble)}};
    make.add(arguments).may_refuse = true;
    NamedArguments training = arguments;
    training.emplace_back("training", true);
    Sample& drawn = make.add(training);
    drawn.may_refuse = drawn.random = true;
  });
}

}  // namespace tessera::testing
