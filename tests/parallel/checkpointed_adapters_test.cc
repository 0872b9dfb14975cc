// Tests that recomputed layers with adapters use the same dropout masks in backward as in forward.
#include <gtest/gtest.h>

#include "tessera/models/adapters/adapters.h"
#include "tessera/parallel/layers/activation_checkpoint.h"
#include "tests/models/tiny.h"

namespace tessera {
namespace {

std::shared_ptr<CausalLM> adapted() {
  auto model = testing::tiny_model();
  add_adapters(*model, {.rank = 2, .dropout = 0.5});
  init_adapters(*model, 7);
  const at::NoGradGuard no_grad;
  for (const auto& [path, linear] : adapted_linears(*model)) linear->lora_B->weight.fill_(0.3);
  return model;
}

std::vector<at::Tensor> gradients_of_two_forwards(CausalLM& model) {
  const auto tokens = testing::tiny_tokens(4, 8);
  at::Tensor loss;
  for (const int64_t first : {0, 2}) {
    const auto rows = tokens.narrow(0, first, 2);
    const auto sum = model.loss_sum({.tokens = rows}, testing::next_labels(rows));
    loss = loss.defined() ? loss + sum : sum;
  }
  loss.backward();
  std::vector<at::Tensor> out;
  for (const auto& [path, linear] : adapted_linears(model)) {
    out.push_back(linear->lora_A->weight.grad());
    out.push_back(linear->lora_B->weight.grad());
  }
  return out;
}

// The recomputed first forward drops the same elements as before, although a second forward has run since.
TEST(CheckpointedAdapters, RecomputationUsesTheDropoutMasksOfItsForward) {
  const auto plain = adapted(), checkpointed = adapted();
  std::vector<nn::Module*> layers;
  for (const auto& [path, module] : checkpointed->named_modules()) {
    if (path.find("layers.") != std::string::npos && path.find('.', path.find("layers.") + 7) == std::string::npos) {
      layers.push_back(module);
    }
  }
  ASSERT_FALSE(layers.empty());
  checkpoint_layers(layers, ActivationCheckpointing::kFull);
  const auto wanted = gradients_of_two_forwards(*plain), found = gradients_of_two_forwards(*checkpointed);
  for (size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(found[i].allclose(wanted[i], 1e-5, 1e-7)) << i;
}

}  // namespace
}  // namespace tessera
